"""What is made of finished trajectories: aligned arrays, padded batches, files. Importing it loads no torch."""

from unspool.data.align import AlignedResponse, align, align_response
from unspool.data.files import read_jsonl, read_metadata, read_parquet, read_prompts, write_jsonl, write_parquet
from unspool.data.padding import pad_batch, training_rows

__all__ = [
    "AlignedResponse",
    "align",
    "align_response",
    "pad_batch",
    "read_jsonl",
    "read_metadata",
    "read_parquet",
    "read_prompts",
    "training_rows",
    "write_jsonl",
    "write_parquet",
]

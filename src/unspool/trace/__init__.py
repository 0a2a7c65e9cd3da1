"""Traces: one JSON file for each finished trajectory, and the way back."""

from unspool.trace.reader import read_document, read_trace
from unspool.trace.writer import TraceWriter

__all__ = ["TraceWriter", "read_document", "read_trace"]

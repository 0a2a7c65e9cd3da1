"""Python code that a model wrote, run where it can do no harm."""

from unspool.world.sandbox.tool import PythonTool

__all__ = ["PythonTool"]

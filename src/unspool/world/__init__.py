"""The world that answers a model: tools and whoever runs them."""

from unspool.world.calculator import calculator
from unspool.world.manager import ToolManager
from unspool.world.protocol import Step, ToolFailure, World
from unspool.world.tool import Tool, tool

__all__ = ["Step", "Tool", "ToolFailure", "ToolManager", "World", "calculator", "tool"]

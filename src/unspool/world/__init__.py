"""The world that answers a model: tools and whoever runs them."""

from unspool.world.calculator import calculator
from unspool.world.env import Env, EnvTool, TextEnv
from unspool.world.env_calls import EnvError
from unspool.world.env_world import EnvWorld
from unspool.world.manager import ToolManager
from unspool.world.player import PolicyPlayer
from unspool.world.protocol import LiveWorld, Step, StepResult, ToolFailure, World
from unspool.world.sandbox import PythonTool
from unspool.world.tool import Tool, tool
from unspool.world.user import UserSimulator

__all__ = [
    "Env",
    "EnvError",
    "EnvTool",
    "EnvWorld",
    "LiveWorld",
    "PolicyPlayer",
    "PythonTool",
    "Step",
    "StepResult",
    "TextEnv",
    "Tool",
    "ToolFailure",
    "ToolManager",
    "UserSimulator",
    "World",
    "calculator",
    "tool",
]

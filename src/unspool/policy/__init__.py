"""The side of an episode that speaks: a model behind a template, or an API."""

from unspool.policy.chat import ChatPolicy
from unspool.policy.openai import OpenAI
from unspool.policy.protocol import Policy, Turn
from unspool.policy.token import TokenPolicy

__all__ = ["ChatPolicy", "OpenAI", "Policy", "TokenPolicy", "Turn"]

"""Chat templates on token ids: encode, bridge, parse."""

from __future__ import annotations

from unspool.template.chat import ChatTemplate
from unspool.template.prompts import tool_prompt, with_examples, with_system

__all__ = ["ChatTemplate", "tool_prompt", "with_examples", "with_system"]

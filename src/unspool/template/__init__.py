"""Chat templates on token ids: encode, bridge, parse."""

from __future__ import annotations

from unspool.template.chat import ChatTemplate

__all__ = ["ChatTemplate"]

"""Chat templates on token ids: encode, bridge, parse; and the doctor, who says what a template does to a rollout."""

from __future__ import annotations

from unspool.template.chat import ChatTemplate
from unspool.template.diagnosis import Diagnosis, Finding, doctor
from unspool.template.prompts import tool_prompt, with_examples, with_system

__all__ = ["ChatTemplate", "Diagnosis", "Finding", "doctor", "tool_prompt", "with_examples", "with_system"]

"""A model that never calls a tool by itself does where `tool_choice` says so, on a real vLLM server."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.engines.server.vllm_parts import engine_of
from tests.vllm_server import VLLMServer
from unspool import ChatTemplate, MultiTurnRollout, ToolManager, tool
from unspool.engines.embedded import ensure_embedded_model

pytestmark = pytest.mark.vllm


@tool
def look_up(colour: Literal["red", "green"], shade: int) -> str:
    """Look a colour up."""
    return f"{colour} {shade > 0}"


def required_at_first(turn: int) -> dict[str, Any]:
    return {"tool_choice": "required" if turn == 0 else "auto"}


async def test_a_first_turn_is_a_well_formed_call_and_the_next_is_free(vllm_server: VLLMServer) -> None:
    template = ChatTemplate(str(ensure_embedded_model()))
    questions = [{"messages": [{"role": "user", "content": text}]} for text in ("What is red?", "And green?", "Hello!")]
    async with engine_of(vllm_server, model="smollm2") as engine:
        rollout = MultiTurnRollout(
            engine,
            template,
            ToolManager([look_up]),
            sampling_params={"max_tokens": 60, "temperature": 0.7},
            max_turns=2,
            seed=3,
            progress=False,
        )
        free = await rollout.acall(questions)
        held = await rollout.acall(questions, extra=required_at_first)
    assert not any(message.get("tool_calls") for result in free for message in result["messages"])
    for result in held:
        [call] = result["messages"][1]["tool_calls"]
        assert call["function"]["name"] == "look_up"
        assert call["function"]["arguments"]["colour"] in ("red", "green")
        assert isinstance(call["function"]["arguments"]["shade"], int)
        assert (result["tool_errors"], result["turns"]) == ([], 2)
        assert [span["origin"] for span in result["spans"]] == ["prompt", "sampled", "bridge", "sampled"]

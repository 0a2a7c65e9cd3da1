"""The package `renderers`: a hand-written Qwen3 renderer, its parse and its bridge."""

from __future__ import annotations

from importlib.metadata import version

from renderers import Qwen3RendererConfig, create_renderer

from benchmarks.workload import TOOL_NAME, Conversation, Run, qwen3, tool_infos

VERSION = version("renderers")


def parse_and_bridge(conversation: Conversation) -> Run:
    """Its own path through a conversation: parse a turn, bridge to the next. No loop, no tool, no record."""
    run = Run()
    renderer = create_renderer(qwen3(), Qwen3RendererConfig())
    tools = [info["function"] for info in tool_infos()]
    prompt = renderer.render_ids(conversation.messages, tools=tools, add_generation_prompt=True)
    run.mark()
    for turn in conversation.turns[:-1]:
        parsed = renderer.parse_response(turn, tools=tools, prompt_ids=prompt)
        (call,) = parsed.tool_calls
        answer = {"role": "tool", "name": TOOL_NAME, "content": conversation.answers[call.arguments["topic"]]}
        bridged = renderer.bridge_to_next_turn(prompt, turn, [answer], tools=tools)
        assert bridged is not None
        prompt = bridged.token_ids
        run.mark()
    run.ids = prompt
    return run


OVERHEAD = {"parse + bridge": (parse_and_bridge, 4)}

"""The package `renderers`, with bridges written by hand for each family, agrees with what we find by probing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests import families
from tests.template import scenarios as s
from unspool.template import ChatTemplate

renderers = pytest.importorskip("renderers", exc_type=ImportError)

RENDERERS = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3_vl": "Qwen3VLRendererConfig",
    "qwen3_5_think": "Qwen35RendererConfig",
    "qwen3_6": "Qwen36RendererConfig",
    "llama3_1": "Llama3RendererConfig",
    "llama3_2": "Llama3RendererConfig",
    "deepseekv3": "DeepSeekV3RendererConfig",
    "glm4moe": "GLM45RendererConfig",
    "nemotron_3_nano": "Nemotron3RendererConfig",
}
"""gpt-oss is not here: its renderer fetches a vocabulary from the network. Nor is Gemma 4, whose tokenizer we lack."""

OPENS_THINKING = {("deepseekv3", "user"): "<think>\n"}
"""What the template's generation prompt has and the oracle's has not: it renders the version without thinking."""

CLOSES_CUT_TURNS = {"glm4moe": "<|endoftext|>"}
"""What the oracle closes a cut turn with and the template never writes: GLM's turns end at the next header."""

SCENARIOS: dict[str, Any] = {
    "tool": lambda t: [s.tool(t, "12 degrees")],
    "two tools": lambda t: [s.tool(t, "12 degrees"), s.tool(t, "noon", "get_time", 1)],
    "user": lambda t: [s.user(t, "And tomorrow?")],
}


@pytest.mark.parametrize("template", RENDERERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("cut", [False, True], ids=["stopped", "cut"])
def test_the_oracle_agrees(template: str, scenario: str, cut: bool) -> None:
    tokenizer = families.tokenizer_for(template)
    config = getattr(renderers, RENDERERS[template])
    keep = {"thinking_retention": "all"} if "thinking_retention" in config.model_fields else {}
    oracle = renderers.create_renderer(tokenizer, config(**keep))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ChatTemplate(tokenizer, chat_template=families.trl_templates()[template])
    new = SCENARIOS[scenario](template)
    prompt = ours.encode([s.user(template, "Hi.")], s.TOOLS)
    opened = ours.decode(prompt).rstrip().endswith("<think>")
    thinking = "hm\n</think>\n\n" if opened else "\n<think></think>\n" if template == "glm4moe" else ""
    sampled = tokenizer.encode(f"{thinking}Well.", add_special_tokens=False)
    if not cut:
        first = new[0]["role"]
        stop = s.HEADERS[first] if template == "glm4moe" else ours.decode([ours.stop_token_ids[0]])
        sampled.append(tokenizer.convert_tokens_to_ids(stop))
    theirs = oracle.bridge_to_next_turn(prompt, sampled, new, tools=s.TOOLS)
    assert theirs is not None
    expected = theirs.token_ids[len(prompt) + len(sampled) :]
    expected += tokenizer.encode(OPENS_THINKING.get((template, scenario), ""), add_special_tokens=False)
    if cut and template in CLOSES_CUT_TURNS:
        assert ours.decode([expected.pop(0)]) == CLOSES_CUT_TURNS[template]
    made = ours.bridge([*prompt, *sampled], new, s.TOOLS)
    assert ours.decode(made) == ours.decode(expected)
    assert made == expected

"""The doctor's verdicts on every template and tokenizer at hand, as tables, and each thing that can be wrong alone.

The tables are what the templates are known to be like; a line here changes only where a parser or a template does.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import families
from tests.small import TEMPLATE, small_template, small_tokenizer
from unspool import ChatTemplate
from unspool.template import Diagnosis, doctor
from unspool.types import InvalidTypeError, InvalidValueError

# ---------------------------------------------------------------------------- every template of trl

PARSER = {
    "cohere": None,
    "cohere2": None,
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma4",
    "gemma": None,
    "gemma3": None,
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "idefics3": None,
    "lfm2": "pythonic",
    "lfm2_2_5": "pythonic",
    "lfm2_2_5_v2": "pythonic",
    "lfm2_2_5_vl": "pythonic",
    "lfm2_v2": "pythonic",
    "llama3": "llama3_json",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "llava_next": None,
    "muse_glimmer": None,
    "nemotron_3_5_lightning": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "phi3": None,
    "phi3_5": None,
    "qwen2_5": "hermes",
    "qwen2_5_vl": None,
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "smolvlm": None,
}
"""The parser of each template; None is what `unknown_format` says. A new parser changes its lines here."""

NO_TOOLS = {
    "cohere": "no_tools no_tool_role drops_calls",
    "cohere2": "no_tools no_tool_role drops_calls",
    "deepseek_r1_distill": "no_tools drops_calls",
    "deepseekv3": "no_tools",
    "gemma": "no_tools no_tool_role drops_calls",
    "gemma3": "no_tools no_tool_role drops_calls",
    "idefics3": "no_tools drops_calls",
    "llama3": "no_tools drops_calls",
    "llava_next": "no_tools no_tool_role drops_calls",
    "phi3": "no_tools no_tool_role drops_calls",
    "phi3_5": "no_tools no_tool_role drops_calls",
    "qwen2_5_vl": "no_tools drops_calls",
    "smolvlm": "no_tools drops_calls",
}
"""Templates that do not tell the model of tools, and what else of tools they lack."""

LOSSES = {
    "gptoss": "drops_second_call",
    "lfm2": "drops_calls",
    "lfm2_2_5": "rewrites_arguments",
    "lfm2_2_5_v2": "rewrites_arguments",
    "llama3_1": "drops_call_text one_call_only",
    "llama3_2": "drops_call_text one_call_only",
    "muse_glimmer": "drops_call_text",
    "deepseek_r1_distill": "no_prompt_behind_answers bridge_differs",
    "deepseekv3": "no_prompt_behind_answers bridge_differs",
    "diffusion_gemma": "no_prompt_behind_answers bridge_differs",
    "gemma4": "no_prompt_behind_answers bridge_differs",
    "gemma4_v3": "no_prompt_behind_answers bridge_differs",
    "gemma4_v4": "no_prompt_behind_answers bridge_differs",
    "gemma4_v5": "no_prompt_behind_answers bridge_differs",
}
"""What else of calls and answers is lost or unusual."""

HISTORY = {
    "diffusion_gemma": "drops_thinking",
    "gemma4_v5": "drops_thinking",
    "glm4moe": "drops_thinking",
    "gptoss": "rewrites_history drops_thinking",
    "lfm2_2_5": "drops_thinking",
    "lfm2_2_5_v2": "drops_thinking",
    "lfm2_2_5_vl": "drops_thinking",
    "nemotron_3_5_lightning": "drops_thinking",
    "nemotron_3_nano": "drops_thinking",
    "nemotron_3_super": "drops_thinking",
    "nemotron_3_ultra": "drops_thinking",
    "phi3": "rewrites_history",
    "phi3_5": "rewrites_history",
    "qwen3": "rewrites_history drops_thinking",
    "qwen3_5_nothink": "rewrites_history drops_thinking",
    "qwen3_5_think": "rewrites_history drops_thinking",
    "qwen3_6": "rewrites_history drops_thinking",
    "qwen3_5_nothink_training": "",
    "qwen3_5_think_training": "",
    "qwen3_6_training": "",
    "qwen3_training": "",
}
"""What becomes of earlier turns. The training variants of Qwen's templates were made so that they stay."""

TRIMS = (
    "cohere", "diffusion_gemma", "gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5",
    "llama3", "llama3_1", "llama3_2", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
)  # fmt: skip
"""Templates that trim what is said."""


def base(template: str) -> str:
    return template.removesuffix("_training")


def named(tokenizer: Any, name: str) -> Any:
    """A stand-in tokenizer under the template's own name, so that it is not taken for its own family's."""
    renamed = copy.copy(tokenizer)
    renamed.name_or_path = name
    return renamed


def expected(template: str) -> set[str]:
    name = base(template)
    found = {*NO_TOOLS.get(name, "").split(), *LOSSES.get(name, "").split()}
    found |= {*HISTORY.get(template, HISTORY.get(name, "")).split()}
    return found | ({"trims_content"} if name in TRIMS else set()) | (set() if PARSER[name] else {"unknown_format"})


BROKEN = {"no_tools", "no_tool_role", "unknown_format"}


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.endswith("_training") else [])
        for name in families.trl_templates()
    ],
)
def test_the_verdict_on_every_template(template: str) -> None:
    tokenizer = named(families.tokenizer_for(template), template)
    found = doctor(tokenizer, chat_template=families.trl_templates()[template])
    assert set(found.codes) == expected(template)
    assert {finding.code for finding in found.broken} == expected(template) & BROKEN
    assert found.ok == (not found.broken) == found.verdict.startswith("Ready for rollouts")
    assert found.parser == PARSER[base(template)]
    assert found.stop_tokens
    assert all(finding.remedy for finding in (*found.broken, *found.notes))


def test_the_tables_name_the_templates_that_there_are() -> None:
    assert set(PARSER) == {base(name) for name in families.trl_templates()}
    assert {*NO_TOOLS, *LOSSES, *TRIMS} <= set(PARSER)
    assert set(HISTORY) <= set(families.trl_templates())


# ---------------------------------------------------------------------------- tokenizers with templates of their own

OWN = {
    "qwen3": (True, "hermes", "rewrites_history drops_thinking"),
    "llama3_1": (False, "llama3_json", "no_tools drops_calls trims_content"),
    "deepseek_v3": (False, "deepseek", "no_tools no_prompt_behind_answers drops_calls bridge_differs"),
    "gptoss": (False, None, "no_template"),
    "gemma3": (False, None, "no_tools no_tool_role unknown_format drops_calls trims_content"),
}


@pytest.mark.parametrize("name", OWN)
def test_the_verdict_on_a_tokenizers_own_template(name: str) -> None:
    found = doctor(families.load(name))
    assert (found.ok, found.parser, " ".join(found.codes)) == OWN[name]


def test_what_is_lost_is_said_in_words(gemma3: Any, llama3_1: Any, deepseek_v3: Any, gptoss: Any) -> None:
    def text(found: Diagnosis, code: str) -> str:
        return next(finding.text for finding in found.findings if finding.code == code)

    assert "Conversation roles must alternate" in text(doctor(gemma3), "no_tool_role")
    assert text(doctor(llama3_1), "drops_calls") == "it drops the calls of messages, silently"
    assert text(doctor(deepseek_v3), "no_prompt_behind_answers") == "no generation prompt behind a tool's answer"
    assert doctor(gptoss).verdict == "Not ready: the tokenizer has no chat template"


def test_the_way_out_that_is_named_leads_out(gemma3: Any, llama3_1: Any, gptoss: Any) -> None:
    for plain in ("react", "cline"):
        assert doctor(gemma3, parser=plain).ok
        assert doctor(llama3_1, parser=plain).ok
    assert doctor(llama3_1, chat_template=families.trl_templates()["llama3_1"]).ok
    assert doctor(gptoss, chat_template=families.trl_templates()["gptoss"]).ok


def test_what_is_not_there_is_not_said_to_be_trimmed() -> None:
    old, new, _ = ALONE["drops_user"]
    found = small(GOOD.replace(old, new))
    assert found.codes == ("drops_user",)
    assert found.verdict.startswith("Not ready: it leaves out what users say")
    cut = new.replace('""', "text(message)[:5]")
    assert small(GOOD.replace(ALONE["drops_user"][0], cut)).codes == ("drops_user",)
    old, new, _ = ALONE["drops_system"]
    assert small(GOOD.replace(old, new)).codes == ("drops_system",)
    assert small(GOOD.replace(old, new), tools=False).codes == (), "this one drops them where there are tools"


def test_a_template_that_refuses_nothing_is_not_said_to_refuse() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    found = small(plain, parser="react")
    assert "refuses" not in " ".join(finding.text for finding in found.findings)
    assert found.bridges["two tools"] == "not compared"
    assert {"no_stop_token", "not_compared"} <= set(found.codes)
    assert not {"one_call_only", "no_render"} & set(found.codes)
    texts = [finding.text for finding in found.notes if finding.code == "not_compared"]
    assert "two tools: the bridge cannot be compared: no token ends the model's turn" in texts


def test_without_tools_what_only_tools_need_is_a_note(gemma3: Any) -> None:
    found = doctor(gemma3, tools=False)
    assert found.ok
    assert {"no_tools", "no_tool_role", "unknown_format"} <= {finding.code for finding in found.notes}


def test_a_bridge_that_only_tools_need_is_a_note_without_them() -> None:
    loop, second = (
        "{%- for message in messages -%}",
        "{%- if messages[loop.index0 - 1].role == message.role == 'tool' -%}",
    )
    source = GOOD.replace(loop, f"{loop}{second}{{{{ raise_exception('one answer') }}}}{{%- endif -%}}")
    found = small(source)
    assert (found.codes, found.bridges["two tools"]) == (("no_bridge",), "refused")
    assert found.verdict.startswith("Not ready: two tools: there is no bridge")
    assert small(source, tools=False).verdict == "Ready for rollouts, with 1 note"


def test_a_tokenizer_of_the_wrong_class_loses_spaces() -> None:
    found = doctor(str(families.folder("deepseek_v3")))
    assert "loses_spaces" in {finding.code for finding in found.broken}
    assert "control_text_leaks" not in found.codes


@pytest.mark.slow
def test_the_embedded_model_is_ready() -> None:
    from unspool.engines.embedded import ensure_embedded_model

    found = doctor(str(ensure_embedded_model()))
    assert (found.ok, found.parser, found.codes) == (True, "hermes", ())
    assert found.stop_tokens == ("<|im_end|>",)


def test_what_thinking_does_and_which_switch_changes_it(qwen3: Any) -> None:
    def thinking(found: Diagnosis) -> str:
        return next(finding.text for finding in found.findings if finding.check == "thinking")

    assert thinking(doctor(qwen3)) == (
        "kept behind a tool's answer, dropped from earlier turns at a new user message "
        "(switches: enable_thinking=False closes it in the prompt)"
    )
    assert thinking(doctor(qwen3, enable_thinking=False)).startswith("the prompt closes it; ")
    opened = doctor(qwen3, chat_template=families.trl_templates()["qwen3_5_think"])
    assert thinking(opened).startswith("the prompt opens it; ")
    later = doctor(qwen3, chat_template=families.trl_templates()["qwen3_8"])
    assert "preserve_thinking=False drops it" in thinking(later)
    assert later.switches == ("add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort")


def test_a_turn_that_stops_on_the_next_header() -> None:
    found = doctor(families.tokenizer_for("glm4moe"), chat_template=families.trl_templates()["glm4moe"])
    (stop,) = (finding for finding in found.findings if finding.check == "stop")
    assert (stop.level, stop.code) == ("ok", "stops_on_header")
    assert stop.text.startswith("turns stop on the next header (<|user|>, <|observation|>)")


def test_why_a_parser_was_chosen(qwen3: Any, llama3_1: Any) -> None:
    def why(found: Diagnosis) -> str:
        return next(finding.text for finding in found.findings if finding.check == "parser")

    assert why(doctor(qwen3)) == "hermes: the template has '<tool_call>' and 'arguments'"
    assert why(doctor(named(llama3_1, "Llama-3.1-8B"))) == "llama3_json: by the name 'Llama-3.1-8B'"
    assert why(doctor(qwen3, parser="hermes")) == "hermes: as was asked for"
    muse = families.trl_templates()["muse_glimmer"]
    assert why(doctor(qwen3, chat_template=muse)).endswith("the format with '<atem:' is known and not supported")


# ---------------------------------------------------------------------------- each thing alone

GOOD = TEMPLATE.read_text(encoding="utf-8")
PROMPT = '{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}'
CALLS = "{%- for call in message.tool_calls or [] -%}"

ALONE: dict[str, tuple[str, str, str]] = {
    "no_generation_prompt": (PROMPT, "", "broken"),
    "no_tools": ("{%- if tools -%}", "{%- if false -%}", "broken"),
    "no_tool_role": ('["system", "user", "tool"]', '["system", "user"]', "broken"),
    "no_stop_token": ("<|im_end|>", "", "broken"),
    "no_bridge": ('"<|im_start|>assistant\\n" ~ said', '"<|im_start|>assistant\\n"', "broken"),
    "bridge_differs": ('<|im_end|>\\n" -}}\n    {%- elif', '<|im_end|>" ~ messages | length -}}\n    {%- elif', "note"),
    "unread_calls": ('<tool_call>\\n{"name": \' ~', '<tool_call>\\n{"nom": \' ~', "broken"),
    "drops_calls": (CALLS, "{%- for call in [] -%}", "note"),
    "drops_second_call": (CALLS, "{%- for call in (message.tool_calls or [])[:1] -%}", "note"),
    "drops_call_text": (
        "{%- set said = text(message) -%}",
        "{%- set said = '' if message.tool_calls else text(message) -%}",
        "note",
    ),
    "doubled_bos": ("{%- set has_system", '{{- "<|im_start|>" * 2 -}}{%- set has_system', "note"),
    "rewrites_history": (
        '"<|im_start|>assistant\\n" ~ said',
        '"<|im_start|>assistant\\n" ~ ("(last) " if loop.last else "") ~ said',
        "note",
    ),
    "one_call_only": (
        CALLS,
        "{%- if (message.tool_calls or [])[1:] -%}{{ raise_exception('one call, please') }}{%- endif -%}" + CALLS,
        "note",
    ),
    "trims_content": ("~ text(message) ~ \"<|im_end|>", "~ text(message) | trim ~ \"<|im_end|>", "note"),
    "drops_user": (
        'message.role ~ "\\n" ~ text(message)',
        'message.role ~ "\\n" ~ ("" if message.role == "user" else text(message))',
        "broken",
    ),
    "drops_system": ('text(messages[0]) ~ "\\n\\n"', '""', "note"),
    "foreign_tokens": ("{%- set has_system", '{%- set other = "<|eot_id|>" -%}{%- set has_system', "note"),
}  # fmt: skip
"""Code, what is replaced in a template that has nothing wrong, by what, and the level."""


def small(source: str = GOOD, **options: Any) -> Diagnosis:
    return doctor(small_tokenizer(), chat_template=source, **options)


def test_a_template_with_nothing_wrong() -> None:
    found = small()
    assert (found.ok, found.codes, found.verdict) == (True, (), "Ready for rollouts")
    assert found.bridges == dict.fromkeys(
        ("tool", "text and tool", "two tools", "follow-up", "cut by length", "thinking", "multi-turn"), "exact"
    )


@pytest.mark.parametrize("code", ALONE)
def test_a_fault_is_found_and_graded(code: str) -> None:
    old, new, level = ALONE[code]
    assert old in GOOD
    tokenizer = copy.copy(small_tokenizer())
    tokenizer.bos_token = "<|im_start|>"
    source = GOOD.replace(old, new)
    found = doctor(tokenizer, chat_template=source)
    assert code in found.codes
    assert next(finding.level for finding in found.findings if finding.code == code) == level
    assert found.ok == (level == "note")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for %}", "chat_template is not valid Jinja"),
        ("{{ raise_exception('never') }}", "does not render a conversation of one user message: never"),
        ("{{ messages.nothing.at_all }}", "does not render a conversation of one user message"),
    ],
)
def test_a_template_that_renders_nothing_is_one_finding(source: str, said: str) -> None:
    found = small(source)
    assert [finding.code for finding in found.findings] == ["bad_template"]
    assert said in found.verdict


def test_a_chat_template_is_examined_as_it_is() -> None:
    template = ChatTemplate(small_tokenizer(), chat_template=GOOD, parser="llama3_json")
    found = doctor(template)
    assert (found.parser, found.codes) == ("llama3_json", ("unread_calls",))
    assert doctor(template, parser="hermes").ok
    assert doctor(small_template()).ok


def test_the_doctor_warns_of_nothing_and_changes_nothing(gemma3: Any) -> None:
    before = gemma3.chat_template
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        doctor(gemma3)
    assert gemma3.chat_template == before


def test_a_diagnosis_is_plain_data() -> None:
    found = small(GOOD.replace(PROMPT, ""))
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["ok"], data["parser"], data["stop_tokens"]) == (False, "hermes", ["<|im_end|>"])
    finding = next(entry for entry in data["findings"] if entry["code"] == "no_generation_prompt")
    assert set(finding) == {"check", "level", "code", "text", "remedy"}
    assert data["verdict"].startswith("Not ready: the generation prompt is missing")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="not int"):
        doctor(7)
    with pytest.raises(InvalidValueError, match="no folder"):
        doctor(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidValueError, match="no tokenizer can be loaded"):
        doctor(str(tmp_path))
    with pytest.raises(InvalidValueError, match="no tool-call parser is called 'hermse'"):
        small(parser="hermse")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 200), st.text(max_size=12))
def test_a_damaged_template_is_a_diagnosis_and_no_exception(at: int, length: int, instead: str) -> None:
    found = small(GOOD[:at] + instead + GOOD[at + length :] or "x")
    assert found.findings
    assert found.ok == ("Not ready" not in found.verdict)
    json.dumps(found.to_dict())

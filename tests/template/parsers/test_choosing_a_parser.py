"""The choice of a parser: by name, by the template, by the tokenizer; never by what a model wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import unspool.engines
from unspool.template.parsers import PARSERS, ToolParser, choose_parser
from unspool.types import InvalidValueError, UnspoolError

HERMES = (
    "qwen2_5 qwen2_5_training qwen3 qwen3_training qwen3_instruct_2507 qwen3_instruct_2507_training "
    "qwen3_vl qwen3_vl_training"
)
XML = (
    "qwen3_5_nothink qwen3_5_nothink_training qwen3_5_think qwen3_5_think_training qwen3_6 qwen3_6_training qwen3_8 "
    "qwen3_8_training nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training "
    "nemotron_3_super nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training"
)
LLAMA = "llama3_1 llama3_2"
DEEPSEEK = "deepseekv3 deepseekv3_training deepseek_r1_distill deepseek_r1_distill_training"
GLM = "glm4moe glm4moe_training"
PYTHONIC = "lfm2 lfm2_training lfm2_v2 lfm2_v2_training lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl"
GEMMA4 = "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma diffusion_gemma_training"
EXPECTED = {
    **dict.fromkeys(("gptoss", "gptoss_training"), "harmony"),
    **dict.fromkeys(GEMMA4.split(), "gemma4"),
    **dict.fromkeys(HERMES.split(), "hermes"),
    **dict.fromkeys(XML.split(), "qwen3_coder"),
    **dict.fromkeys(LLAMA.split(), "llama3_json"),
    **dict.fromkeys(PYTHONIC.split(), "pythonic"),
    **dict.fromkeys(DEEPSEEK.split(), "deepseek"),
    **dict.fromkeys(GLM.split(), "glm"),
}


def named(parser: ToolParser | None) -> str | None:
    return parser.name if parser else None


def test_every_template_of_trl_gets_its_parser_or_none(templates: dict[str, str]) -> None:
    chosen = {name: named(choose_parser(source)) for name, source in templates.items()}
    assert {name: parser for name, parser in chosen.items() if parser} == {
        name: parser for name, parser in EXPECTED.items() if name in templates
    }


def test_the_template_outweighs_the_name_of_the_tokenizer(templates: dict[str, str]) -> None:
    assert named(choose_parser(templates["llama3_1"], "Qwen/Qwen3-8B")) == "llama3_json"
    assert named(choose_parser(templates["gptoss"], "Qwen/Qwen3-8B")) == "harmony"
    assert named(choose_parser(templates["glm4moe"], "Qwen/Qwen3-8B")) == "glm"
    assert (
        named(choose_parser(templates["deepseek_r1_distill"], "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")) == "deepseek"
    )
    assert named(choose_parser(templates["gemma4"], "Qwen/Qwen3-8B")) == "gemma4"


def test_the_template_of_the_built_in_engine_is_hermes() -> None:
    folder = Path(unspool.engines.__file__).parent / "assets"
    for path in folder.rglob("chat_template.jinja"):
        assert named(choose_parser(path.read_text(encoding="utf-8"))) == "hermes"


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen/Qwen3-8B", "hermes"),
        ("/models/minimind-3", "hermes"),
        ("NousResearch/Hermes-2-Pro-Mistral-7B", "hermes"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("Qwen/Qwen3.5-4B", "qwen3_coder"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "pythonic"),
        ("LiquidAI/LFM2-1.2B", "pythonic"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "mistral"),
        ("mistralai/Devstral-Small-2507", "mistral"),
        ("deepseek-ai/DeepSeek-V3", "deepseek"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek"),
        ("zai-org/GLM-4.5-Air", "glm"),
        ("zai-org/GLM-5", "glm"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2"),
        ("moonshotai/Kimi-Dev-72B", None),
        ("zai-org/glm-4-9b-chat", None),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_dsml"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("openai/gpt-oss-20b", "harmony"),
        ("google/gemma-4-E2B-it", "gemma4"),
        ("google/gemma-3-4b-it", None),
        ("someone/something", None),
        ("", None),
    ],
)
def test_a_template_that_shows_nothing_leaves_the_choice_to_the_name(name: str, parser: str | None) -> None:
    assert named(choose_parser("{{ messages }}", name)) == parser


def test_a_parser_can_be_named() -> None:
    assert {
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "pythonic",
        "mistral",
        "deepseek",
        "deepseek_dsml",
        "glm",
        "kimi_k2",
    } <= set(PARSERS)
    assert {"harmony", "gemma4", "react", "cline"} <= set(PARSERS)
    for name, parser in PARSERS.items():
        assert choose_parser("<tool_call> arguments", "gpt-oss", name) is parser
        assert isinstance(parser, ToolParser)


def test_formats_that_no_template_is_made_for_are_never_chosen(templates: dict[str, str]) -> None:
    chosen = {named(choose_parser(source, name)) for name, source in templates.items()}
    assert not chosen & {"react", "cline"}
    assert choose_parser("Thought: Action: Action Input: <tool_name>", "react-cline") is None


def test_an_unknown_name_is_an_error_that_shows_the_nearest_and_all() -> None:
    with pytest.raises(InvalidValueError, match=r"'qwen3-codr'.*Did you mean 'qwen3_coder'\?.*hermes, qwen3_coder"):
        choose_parser("", "", "qwen3-codr")
    with pytest.raises(UnspoolError, match=r"'zzz'\. There are: hermes"):
        choose_parser("", "", "zzz")


def test_instructions_for_pythonic_calls_outweigh_the_llama_header() -> None:
    source = '<|start_header_id|> "parameters" Example Format: [func_name1(params_name1=params_value1)]'
    assert named(choose_parser(source)) == "pythonic"

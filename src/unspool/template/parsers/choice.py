"""Which parser belongs to which chat template: a table read from top to bottom, the first row that fits decides.

Rows whose parser is None are formats that are known and not supported: they stop the search, so that a template
of theirs is never read with the parser of a family that its tokenizer happens to be named after.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from unspool.template.parsers.base import ToolParser
from unspool.template.parsers.cline import ClineParser
from unspool.template.parsers.deepseek import DEEPSEEK
from unspool.template.parsers.dsml import DsmlParser
from unspool.template.parsers.gemma4 import Gemma4Parser
from unspool.template.parsers.glm import GlmParser
from unspool.template.parsers.harmony import HarmonyParser
from unspool.template.parsers.hermes import HermesParser
from unspool.template.parsers.kimi import KIMI_K2
from unspool.template.parsers.llama3_json import Llama3JsonParser
from unspool.template.parsers.mistral import MistralParser
from unspool.template.parsers.pythonic import PythonicParser
from unspool.template.parsers.qwen3_coder import Qwen3CoderParser
from unspool.template.parsers.react import ReactParser
from unspool.types import InvalidValueError

_ALL: tuple[ToolParser, ...] = (
    HermesParser(),
    Qwen3CoderParser(),
    Llama3JsonParser(),
    PythonicParser(),
    MistralParser(),
    DEEPSEEK,
    DsmlParser(),
    GlmParser(),
    KIMI_K2,
    HarmonyParser(),
    Gemma4Parser(),
    ReactParser(),  # this and the next one only where they are named: no template is made for them
    ClineParser(),
)

PARSERS: Mapping[str, ToolParser] = MappingProxyType({parser.name: parser for parser in _ALL})
"""Every parser by its name."""


class Format(NamedTuple):
    """A format of calls: the marks that a template of it has all of, and its parser, if there is one."""

    marks: tuple[str, ...]
    parser: str | None


FORMATS: tuple[Format, ...] = (
    # --- formats with marks of their own
    Format(("<function=", "<parameter="), "qwen3_coder"),  # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
    Format(("<|tool_call_start|>",), "pythonic"),  # LFM2
    Format(("<|tool_list_start|>",), "pythonic"),  # LFM2, first templates: calls are left to the content
    Format(("[func_name1(",), "pythonic"),  # Llama 4 and 3.2 with pythonic instructions
    Format(("<|tool_call>",), "gemma4"),  # Gemma 4
    Format(("<arg_key>",), "glm"),  # GLM 4.5 and later
    Format(("<|channel|>",), "harmony"),  # gpt-oss
    Format(("<atem:",), None),  # Muse
    Format(("tool▁call",), "deepseek"),  # DeepSeek V3, R1, V3.1
    Format(("｜DSML｜",), "deepseek_dsml"),  # DeepSeek V3.2 and later
    Format(("<|tool_call_begin|>",), "kimi_k2"),  # Kimi K2
    Format(("<invoke name=",), None),  # MiniMax M2
    Format(("[TOOL_CALLS]",), "mistral"),  # Mistral
    Format(("<|START_ACTION|>",), None),  # Cohere Command
    Format(("<|tool_call|>",), None),  # Granite, Phi-4-mini
    Format(("<function_calls>",), None),  # OLMo 3
    Format(("<tool_calls>",), None),  # Hunyuan, Jamba
    # --- formats known by the words of their instructions
    Format(("<tool_call>", "arguments"), "hermes"),  # Hermes, Qwen2.5, Qwen3, MiniMind
    Format(("<|python_tag|>",), "llama3_json"),  # Llama 3.1
    Format(("<|start_header_id|>", '"parameters"'), "llama3_json"),  # Llama 3.2
    Format(("<|header_start|>", '"parameters"'), "llama3_json"),  # Llama 4
)

NAMES: tuple[tuple[re.Pattern[str], str | None], ...] = tuple(
    (re.compile(pattern), parser)
    for pattern, parser in (
        (r"hermes", "hermes"),  # before the family that it was made from
        (r"qwen-?3[-_.]?coder|qwen-?3\.[5-9]|nemotron[-_]?3", "qwen3_coder"),
        (r"mi(?:ni)?stral|mixtral|magistral|devstral", "mistral"),
        (r"deepseek[-_]?(?:v3(?!\.[2-9])|r1(?!-distill))", "deepseek"),
        (r"deepseek[-_]?v(?:3\.2|4)", "deepseek_dsml"),
        (r"glm-?(?:4\.[5-9]|5)", "glm"),
        (r"kimi-?k2", "kimi_k2"),
        (r"gpt-?oss", "harmony"),
        (r"gemma-?4", "gemma4"),
        (r"deepseek|gemma|glm-?\d|kimi|command-?[ra]|minimax|granite|phi-?\d|olmo", None),
        (r"lfm-?2|llama-?4", "pythonic"),
        (r"qwen-?2\.5|qwen-?3|qwq|minimind", "hermes"),
        (r"llama-?3", "llama3_json"),
    )
)
"""The same by the tokenizer's name, lower case, for templates that show nothing of how calls are written."""


def choose_parser(template_source: str, tokenizer_name: str = "", name: str | None = None) -> ToolParser | None:
    """The parser for a chat template: the one named, else by the template's source, else by the tokenizer's name.

    Returns:
        None where nothing says how calls are written, or where they are written in a way that is not supported.

    Raises:
        InvalidValueError: no parser is called `name`.
    """
    if name is not None:
        if name not in PARSERS:
            near = get_close_matches(name.lower().replace("-", "_"), PARSERS, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidValueError(f"no tool-call parser is called {name!r}.{hint} There are: {', '.join(PARSERS)}")
        return PARSERS[name]
    for form in FORMATS:
        if all(mark in template_source for mark in form.marks):
            return PARSERS.get(form.parser) if form.parser else None
    lowered = tokenizer_name.lower()
    for pattern, parser in NAMES:
        if pattern.search(lowered):
            return PARSERS.get(parser) if parser else None
    return None

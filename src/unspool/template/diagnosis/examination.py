"""`doctor`: loads, runs every check, and sums up. It raises only where there is nothing to examine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from unspool.template.chat import ChatTemplate
from unspool.template.diagnosis import bridges, calls, thoughts, turns
from unspool.template.diagnosis.findings import Diagnosis, Finding
from unspool.template.diagnosis.patient import Patient, short
from unspool.types import InvalidValueError, MissingExtraError, TemplateError

_OF_TOOLS = frozenset(("no_tools", "no_tool_role", "unknown_format", "unread_calls"))
"""What is broken for rollouts with tools only."""
_NO_TEMPLATE = "pass chat_template= with Jinja source, from the model's page or of another family"


def doctor(
    tokenizer_or_name: Any,
    *,
    chat_template: str | None = None,
    parser: str | None = None,
    tools: bool = True,
    trust_remote_code: bool = False,
    **template_kwargs: Any,
) -> Diagnosis:
    """Examine a tokenizer with its chat template.

    Args:
        tokenizer_or_name: a Hugging Face tokenizer, the name or folder to load one from, or a ChatTemplate, whose
            own template, parser and switches are examined where none are given here.
        chat_template: Jinja source to examine instead of the tokenizer's own.
        parser: name of the tool-call parser; None: chosen as ChatTemplate chooses.
        tools: whether rollouts use tools; if not, what only tools need is a note.
        trust_remote_code: run code that comes with the tokenizer, where a name is given.
        template_kwargs: switches of the template.

    Returns:
        The diagnosis. A tokenizer without a template, and a template that is no Jinja, are findings.

    Raises:
        InvalidValueError: the tokenizer cannot be loaded, or there is no such parser.
        InvalidTypeError: no tokenizer.
        MissingExtraError: a name was given and transformers is not installed.
    """
    if isinstance(tokenizer_or_name, ChatTemplate):
        given = tokenizer_or_name
        tokenizer_or_name = given.tokenizer
        chat_template = given.source if chat_template is None else chat_template
        parser = given._parser_name if parser is None else parser
        template_kwargs = {**given.template_kwargs, **template_kwargs}
    if isinstance(tokenizer_or_name, str | Path):
        tokenizer_or_name = load_tokenizer(str(tokenizer_or_name), trust_remote_code)
    name = str(getattr(tokenizer_or_name, "name_or_path", "") or type(tokenizer_or_name).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each warning is a finding here
        try:
            template = ChatTemplate(tokenizer_or_name, chat_template=chat_template, parser=parser, **template_kwargs)
        except TemplateError as error:
            return Diagnosis(name, (_no_template(error),))
        return _examine(name, template, tools)


def _examine(name: str, template: ChatTemplate, tools: bool) -> Diagnosis:
    patient = Patient(template)
    results: dict[str, bridges.Result] = {}
    findings = tuple(_findings(patient, results, tools))
    if not tools:
        findings = tuple(
            replace(finding, level="note") if finding.level == "broken" and _is_of_tools(finding) else finding
            for finding in findings
        )
    return Diagnosis(
        name=name,
        findings=findings,
        parser=template.parser.name if template.parser else None,
        stop_tokens=tuple(patient.text_of(token) for token in template.stop_token_ids),
        switches=thoughts.switches(patient),
        bridges={scenario: result.outcome for scenario, result in results.items()},
    )


def _findings(patient: Patient, results: dict[str, bridges.Result], tools: bool) -> Iterator[Finding]:
    if patient.try_render([patient.user()]) is None:
        said = patient.refusal([patient.user()]) or ""
        text = f"the template does not render a conversation of one user message: {said}"
        yield Finding("template", "broken", "bad_template", text, _NO_TEMPLATE)
        return
    yield from turns.check_tokenizer(patient)
    yield from turns.check_prompt(patient)
    yield from turns.check_stops(patient)
    yield from calls.check_tools(patient)
    yield from calls.check_parser(patient)
    yield from calls.check_calls(patient)
    results.update(bridges.examine(patient))
    yield from bridges.findings(results, patient.traits.tool_role or patient.plain is not None)
    yield from turns.check_history(patient)
    yield from thoughts.check_thinking(patient)
    yield from turns.check_marks(patient)
    yield from turns.check_said(patient, tools)
    yield from turns.check_texts(patient)


def _is_of_tools(finding: Finding) -> bool:
    return finding.code in _OF_TOOLS or any(finding.text.startswith(f"{name}:") for name in bridges.OF_TOOLS)


def _no_template(error: TemplateError) -> Finding:
    if "no chat template" in str(error):
        return Finding("template", "broken", "no_template", "the tokenizer has no chat template", _NO_TEMPLATE)
    return Finding("template", "broken", "bad_template", short(str(error)), _NO_TEMPLATE)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder, or of a name on the hub.

    Raises:
        InvalidValueError: there is none; it says what was looked for.
        MissingExtraError: transformers is not installed.
    """
    if not name.strip():
        raise InvalidValueError(f"the name {name!r} is empty; give the folder of a tokenizer, or owner/model")
    folder = Path(name)
    if folder.is_file():
        raise InvalidValueError(f"{name} is a file; give the folder of a tokenizer, and a template's file beside it")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InvalidValueError(f"there is no folder {name}; give that of a tokenizer, or a name such as owner/model")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("a tokenizer needs transformers: run `pip install 'unspool[torch]'`") from error
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError, and errors of the tokenizers library
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # A first line that ends in a colon says nothing without those behind it.
        reason = (short(str(error), 300) if lines[0].rstrip().endswith(":") else lines[0]).rstrip(".: ")
        raise InvalidValueError(
            f"no tokenizer can be loaded from {name} ({reason}); "
            "it needs files such as tokenizer.json and tokenizer_config.json"
        ) from error

"""`unspool doctor`: a diagnosis for a person, or as JSON; the exit code says whether rollouts work.

What a template or a tokenizer says is shown, never carried out: control characters are spelled out, markup is not read.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.cli.loading import model_folder
from unspool.cli.pieces import visible
from unspool.engines.embedded import EMBEDDED
from unspool.template import Diagnosis, Finding, doctor
from unspool.types import InvalidValueError, MissingExtraError

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "broken": ("broken", "bold red")}


def examine(
    model: str = EMBEDDED,
    *,
    template: Path | None = None,
    parser: str | None = None,
    tools: bool = True,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """The diagnosis of a folder, a name on the hub, or the embedded model.

    Args:
        model: folder of a tokenizer, name on the hub, or `"embedded"`.
        template: file with Jinja source, to examine instead of the tokenizer's own.
        parser: name of the tool-call parser; None: chosen.
        tools: whether rollouts use tools.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        InvalidValueError: no tokenizer, no such file, or no such parser.
        MissingExtraError: transformers is not installed.
    """
    source = None if template is None else _read(template)
    folder = _folder(model)
    try:
        from unspool.engines.quiet import quiet_transformers

        with quiet_transformers():
            found = doctor(
                folder, chat_template=source, parser=parser, tools=tools, trust_remote_code=trust_remote_code
            )
    except ImportError as error:
        if isinstance(error, MissingExtraError):
            raise
        raise MissingExtraError("a tokenizer needs transformers: run `pip install 'unspool[torch]'`") from error
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"--template: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"--template: {file} is no UTF-8 text ({error}); save it as such") from error


def _folder(model: str) -> str:
    if not model.strip():
        return model  # `doctor` says what is wrong with it
    path = Path(model)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZERS):
        templates = sorted(path.glob("*.jinja"))
        way = f"; to examine its template with another tokenizer: --template {templates[0]}" if templates else ""
        raise InvalidValueError(f"{model} holds no tokenizer (none of {', '.join(_TOKENIZERS[:3])}){way}")
    if path.exists() or "/" not in model.strip("/") or model.startswith((".", "/", "~")) or model.count("/") > 1:
        return model_folder(model) if model == EMBEDDED else model  # `doctor` says what is wrong with a path
    try:
        return model_folder(model)
    except InvalidValueError as error:
        raise InvalidValueError(str(error).removeprefix("model.path: ")) from error


_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
"""Files of which a folder with a tokenizer has one."""


def show_diagnosis(found: Diagnosis, console: Console | None = None, *, as_json: bool = False) -> None:
    """Print a diagnosis: the verdict, then what is broken, then notes, then what is fine."""
    console = console or Console()
    if as_json:
        console.print(json.dumps(found.to_dict(), indent=2), soft_wrap=True, markup=False, highlight=False, emoji=False)
        return
    page = _Page(console.encoding)
    console.print(page.verdict(found))
    console.print(page.facts(found), style="dim")
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in _sorted(found):
        mark, colour = _MARKS[finding.level]
        table.add_row(Text(mark, colour), Text(finding.check), page.what(finding))
    console.print(table)


def _sorted(found: Diagnosis) -> list[Finding]:
    fine = (finding for finding in found.findings if finding.level == "ok")
    return [*found.broken, *found.notes, *fine]


class _Page:
    """The parts of the page, in characters that its encoding has."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def verdict(self, found: Diagnosis) -> Text:
        head = "Ready for rollouts" if found.ok else "Not ready"
        text = Text(head, "bold green" if found.ok else "bold red")
        return text.append(self._line(found.verdict.removeprefix(head)), "not bold default")

    def facts(self, found: Diagnosis) -> Text:
        facts = [found.name, f"parser {found.parser or 'none'}"]
        if found.switches:
            facts.append(f"switches {', '.join(found.switches)}")
        return Text(self._line(" · ".join(facts)))

    def what(self, finding: Finding) -> Text:
        text = Text(self._line(finding.text))
        if finding.level != "ok":
            text.append(f" [{finding.code}]", "dim")
        if finding.remedy:
            text.append("\n").append(self._line(f"→ {finding.remedy}"), "cyan")
        return text

    def _line(self, text: str) -> str:
        shown = visible(text).replace("\n", "\u240a")
        return shown.encode(self._encoding, "backslashreplace").decode(self._encoding)

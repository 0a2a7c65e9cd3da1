"""Rendering of chat templates: the same text as transformers' `apply_chat_template`, without what that costs a call.

The environment has the extensions, filters and globals that chat templates are written for, in a sandbox that cannot
change what it is given. A test renders every template at hand both ways. What a template raises becomes a
`TemplateError` with the template's own message, and so does a render that grows beyond what its messages can need. A
template that loops and writes nothing is not stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.types import MessageDict, TemplateError, ToolInfo

_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(("index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem"))
_MOST = 1_000_000
"""Characters that a template may write, or make by repeating, without as much being given to it."""
_A_PIECE = 8
"""What each piece that it writes counts for beside its characters, so that endless writing of nothing ends soon."""
_TIMES = 20
"""How often it may write what it is given: some templates write a text twice, and escapes make it longer."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short ways for the two look-ups that chat templates make all the time."""

    intercepted_binops = frozenset(("*", "**"))  # which are not carried out at compile time either

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > _MOST:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _DICT_NAMES:
                return obj[attribute]
        elif kind is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _size(operator: str, left: Any, right: Any) -> int:
    """How large the result is, in items of a text or list or in bits of a whole number; 0 for anything else."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits + right.bit_length() if operator == "*" else bits * max(right, 0)
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int):
            return len(items) * times
    return 0


class _Generation(Extension):
    """`{% generation %}` marks what an assistant writes, for trainers; here it is a scope and nothing more."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class Renderer:
    """One template with its variables: special tokens and switches."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.variables = dict(variables)
        try:
            self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat_template is not valid Jinja (line {error.lineno}): {error.message}") from error

    def render(
        self, messages: Sequence[MessageDict], tools: Sequence[ToolInfo] | None, generation_prompt: bool = True
    ) -> str:
        """The conversation as text.

        Raises:
            TemplateError: one sentence, with the template's own message.
        """
        template = self._template
        context = template.new_context(
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": generation_prompt,
                **self.variables,
            }
        )
        try:
            return self._joined(template.root_render_func(context), (messages, tools, self.variables))
        except TemplateError:
            raise
        except jinja2.UndefinedError as error:
            raise TemplateError(f"the chat template needs something that the messages lack: {error}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program of someone else's: it can fail in any way
            what = f"{type(error).__name__}: {error}"
            raise TemplateError(f"the chat template fails on these messages: {what}") from error

    def _joined(self, pieces: Iterable[str], given: object) -> str:
        """The text of the pieces, if it comes to an end."""
        kept, written, most = [], 0, _MOST
        for piece in pieces:
            kept.append(piece)
            written += len(piece) + _A_PIECE
            if written > most:
                most = _MOST + _TIMES * len(str(given))
                if written > most:
                    raise TemplateError(
                        "the chat template does not come to an end: it writes far more than these messages need; "
                        "pass chat_template= with another one"
                    )
        return "".join(kept)

    def try_render(
        self, messages: Sequence[MessageDict], tools: Sequence[ToolInfo] | None = None, generation_prompt: bool = True
    ) -> str | None:
        """The same, for probes: None where the template raises."""
        try:
            return self.render(messages, tools, generation_prompt)
        except TemplateError:
            return None

    def names(self) -> set[str]:
        """The variables that the template reads, if it is given them."""
        return meta.find_undeclared_variables(self._template.environment.parse(self.source))

    def switches(self) -> set[str]:
        """The variables that the template reads from outside, and does not only set for itself."""
        environment = self._template.environment
        tree = environment.parse(self.source)
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        parameters = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "param"}
        asked = {
            test.node.name
            for test in tree.find_all((nodes.Test, nodes.Filter))
            if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)
        }
        return (self.names() - set(environment.globals)) - (own - asked) - parameters

    def literals(self) -> list[str]:
        """The short strings that stand in the template's own expressions."""
        tree = self._template.environment.parse(self.source)
        found = (constant.value for constant in tree.find_all(nodes.Const))
        return list(dict.fromkeys(value for value in found if isinstance(value, str) and 0 < len(value) <= 80))

    def with_variables(self, variables: Mapping[str, Any]) -> Renderer:
        """The same template with some variables changed."""
        return Renderer(self.source, {**self.variables, **variables})

    def __reduce__(self) -> tuple[type[Renderer], tuple[str, dict[str, Any]]]:
        return Renderer, (self.source, self.variables)

"""A tool: a function that a model may call, and what the model is told of it.

A `Tool` never changes after it is made, gives out only copies of its schema, and pickles wherever its function
does, also when `@tool` has taken the function's place in its module.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, overload

from unspool.types import InvalidTypeError, InvalidValueError, ToolInfo
from unspool.world import schema
from unspool.world.output import shorten

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SHOWN = 300  # characters of a bad value that an error repeats


@dataclass(frozen=True, eq=False)
class Tool:
    """A function, sync or async, with the name, description and JSON schema that a model sees.

    Attributes:
        name: what the model calls it.
        description: what the model reads about it.
        parameters: JSON schema of an object; the arguments are checked against it.
        function: called with the arguments by name, coerced to its annotations where it has any.
        timeout: seconds; None: the manager's; `math.inf`: none.
        max_chars: most characters of its output that the model sees; None: the manager's.

    Calling a Tool calls its function, as if it had not been made a tool.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] = field(repr=False)
    timeout: float | None = None
    max_chars: int | None = None

    in_order: ClassVar[bool] = False
    """Whether the calls of a turn that has one of this tool are run one after another."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidValueError(
                f"a tool's name must be 1 to 128 letters, digits, '_', '-' or '.', not {self.name!r}; give it name=..."
            )
        if not isinstance(self.description, str):
            raise InvalidTypeError(f"tool {self.name!r}: description must be a str, not {self.description!r}")
        if not callable(self.function):
            raise InvalidTypeError(f"tool {self.name!r}: function must be callable, not {self.function!r}")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise InvalidValueError(
                f"tool {self.name!r}: parameters must be a JSON schema of an object, not {self.parameters!r}"
            )
        check_limits(f"tool {self.name!r}: ", self.timeout, "max_chars", self.max_chars)
        try:
            written = json.dumps(self._parts(), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"tool {self.name!r}: parameters cannot be written as JSON ({error})") from error
        object.__setattr__(self, "_written", written)
        object.__setattr__(self, "__doc__", self.description)

    def _parts(self) -> ToolInfo:
        """As `info`, sharing the schema."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def info(self) -> ToolInfo:
        """The tool in OpenAI's form; a fresh object each time."""
        written: str = self.__dict__["_written"]
        info: ToolInfo = json.loads(written)
        return info

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result (a coroutine where it is async), unbounded and unchecked."""
        return self.function(*args, **kwargs)

    @cached_property
    def is_async(self) -> bool:
        """Whether the function runs on the event loop, not on a thread."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        candidates = (function, getattr(type(function), "__call__", None))  # noqa: B004 - its method is wanted
        return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in candidates)

    def problem(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments, in words that name the parameter; None: nothing."""
        known = self._accepted
        for name in arguments:
            if known is not None and name not in known:
                takes = ", ".join(sorted(known)) or "none"
                return f"{self.name} has no argument {_show(name)}; it takes: {takes}"
        if self.validator.is_valid(arguments):
            return None
        for error in self.validator.iter_errors(arguments):
            path = list(error.instance_path)
            said = shorten(error.message, _SHOWN).text
            if path:
                where = str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
                return f"argument {where!r} of {self.name}: {said}"
            missing = getattr(error.kind, "property", None)
            if missing is not None:
                return f"{self.name} needs the argument {str(missing)!r}"
            return f"the arguments of {self.name}: {said}"
        return None

    def bind(self, arguments: dict[str, Any]) -> schema.Bound:
        """Arguments that have no `problem`, as the function's own: `(positional, keyword)`.

        Raises:
            Exception: an annotation asks for more than the schema says; the message is a sentence.
        """
        try:
            return self._binder(arguments)
        except Exception as error:
            raise InvalidValueError(self._refused(error)) from error

    def _refused(self, error: Exception) -> str:
        errors = getattr(error, "errors", None)
        if not callable(errors):
            return f"the arguments of {self.name}: {shorten(str(error), _SHOWN).text}"
        first = errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        return f"argument {where!r} of {self.name}: {first['msg']}, not {_show(first['input'])}"

    @cached_property
    def validator(self) -> Any:
        """The compiled schema.

        Raises:
            InvalidValueError: the schema is not valid JSON schema.
        """
        import jsonschema_rs

        try:
            return jsonschema_rs.validator_for(dict(self.parameters))
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidValueError(f"tool {self.name!r}: parameters is not a valid JSON schema: {reason}") from error

    @cached_property
    def _binder(self) -> schema.Binder:
        return schema.binder(self.function, self.name)

    @cached_property
    def _accepted(self) -> frozenset[str] | None:
        if self.parameters.get("additionalProperties"):
            return None
        takes = schema.accepts(self.function, self.name)
        properties = frozenset(self.parameters.get("properties", ()))
        if takes is None:  # a function of `**kwargs`: the schema alone says what it takes
            return properties or None
        return takes & properties if properties else takes

    def __reduce__(self) -> tuple[Any, ...]:
        _make_findable(self.function)
        return (
            type(self),
            (self.name, self.description, dict(self.parameters), self.function, self.timeout, self.max_chars),
        )


def check_limits(whose: str, timeout: object, chars_name: str, chars: object) -> None:
    """Refuse time-outs and output limits that limit nothing or everything."""
    if timeout is not None and not (
        isinstance(timeout, int | float) and not isinstance(timeout, bool) and not math.isnan(timeout) and timeout > 0
    ):
        raise InvalidValueError(f"{whose}timeout must be seconds above 0, or None, not {timeout!r}")
    if chars is not None and not (isinstance(chars, int) and not isinstance(chars, bool) and chars >= 1):
        raise InvalidValueError(f"{whose}{chars_name} must be at least 1, not {chars!r}")


def _show(value: object) -> str:
    return shorten(repr(value), _SHOWN).text


def _make_findable(function: Callable[..., Any]) -> None:
    """Let pickle find a function whose name in its module now means the Tool made of it.

    pickle follows dotted names, so the function is told that it is called `name.function`. By-value pickles
    (cloudpickle's of `__main__`) go on working, which a reference of our own would break.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    qualname = getattr(function, "__qualname__", "")
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Tool) and found.function is function:
        function.__qualname__ = f"{qualname}.function"


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    function: None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    max_chars: int | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    max_chars: int | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a typed function, sync or async: `@tool`, or `@tool(name=..., timeout=...)`.

    The schema comes from the signature, the descriptions from the docstring.

    Raises:
        InvalidTypeError: a parameter without annotation, `*args` or `**kwargs`, or a type that JSON cannot say.
    """

    def make(function: Callable[..., Any]) -> Tool:
        if not callable(function) or isinstance(function, Tool):
            raise InvalidTypeError(f"a tool is made of a function, not of {function!r}")
        called = name or _name_of(function)
        text, parameters = schema.describe(function, called)
        return Tool(called, text if description is None else description, parameters, function, timeout, max_chars)

    return make if function is None else make(function)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))

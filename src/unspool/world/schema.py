"""A typed function as a tool: its JSON schema for the model, and arguments as objects of its annotations.

One pydantic adapter does both, so what the schema admits is what the function gets. pydantic and docstring_parser
are imported here at the first use only.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unspool.types import InvalidTypeError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Bound = tuple[list[Any], dict[str, Any]]
Binder = Callable[[dict[str, Any]], Bound]

# Their JSON values are Python's own: nothing to coerce, so pydantic need not be loaded for them.
_AS_THEY_ARE = (str, bool, Any, inspect.Parameter.empty, object)


def describe(function: Callable[..., Any], name: str) -> tuple[str, dict[str, Any]]:
    """The description and the parameters' JSON schema of a typed function.

    Raises:
        InvalidTypeError: a parameter without annotation, one that takes many (`*args`), or a type without a schema.
    """
    from pydantic.errors import PydanticUserError

    signature = _signature(function, name)
    for parameter in signature.parameters.values():
        _check(parameter, name)
    description, documented = _docstring(function)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a default that JSON cannot write is only left out of the schema
            schema = _adapter(signature).json_schema()
    except (PydanticUserError, NameError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidTypeError(
            f"tool {name!r}: an annotation cannot be written as JSON schema ({reason}); "
            "use JSON types, dataclasses, TypedDicts or pydantic models"
        ) from error
    return description, _parameters(schema, documented)


def binder(function: Callable[..., Any], name: str) -> Binder:
    """What turns checked JSON arguments into the arguments of `function`: `(positional, keyword)`.

    It raises pydantic's ValidationError where an annotation asks for more than the schema says.
    """
    signature = _signature(function, name)
    parameters = signature.parameters.values()
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in many]
    positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    plain = all(any(p.annotation is kind for kind in _AS_THEY_ARE) for p in named)
    # A default written as pydantic's `Field(...)` is for pydantic to fill in.
    if plain and not positional and not any(type(p.default).__module__.startswith("pydantic") for p in named):
        return lambda arguments: ([], arguments)
    adapter = _adapter(signature)
    known = {p.name for p in named}

    def bind(arguments: dict[str, Any]) -> Bound:
        keyword = adapter.validate_python({key: value for key, value in arguments.items() if key in known})
        # What only `**kwargs` takes has no annotation to meet.
        keyword.update((key, value) for key, value in arguments.items() if key not in known)
        return [keyword.pop(key) for key in positional], keyword

    return bind


def accepts(function: Callable[..., Any], name: str) -> frozenset[str] | None:
    """The names of the arguments that `function` takes; None: any."""
    parameters = _signature(function, name).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        raise InvalidTypeError(
            f"tool {name!r}: an annotation names {error.name!r}, which its module does not have; define it there"
        ) from error
    except ValueError as error:
        raise InvalidTypeError(f"tool {name!r} has no signature to read ({error}); wrap it in a function") from error


def _check(parameter: inspect.Parameter, name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidTypeError(
            f"tool {name!r}: {str(parameter).split(':')[0]} cannot be described to a model; "
            "give it a list or dict parameter"
        )
    if parameter.annotation is parameter.empty:
        raise InvalidTypeError(
            f"tool {name!r}: parameter {parameter.name!r} has no type annotation; write one, "
            f"such as {parameter.name}: str"
        )


def _adapter(signature: inspect.Signature) -> TypeAdapter[Any]:
    """An adapter from JSON arguments to keyword arguments, defaults filled in."""
    from pydantic import TypeAdapter

    def keywords(**arguments: Any) -> dict[str, Any]:
        return arguments

    # pydantic reads a function's signature; this stand-in has the tool's, and only returns what it is given.
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=Any if p.annotation is p.empty else _readable(p.annotation))
        for p in signature.parameters.values()
        if p.kind not in many
    ]
    keywords.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    keywords.__annotations__ = {p.name: p.annotation for p in named}
    return TypeAdapter(keywords)  # type: ignore[arg-type]


def _readable(annotation: Any) -> Any:
    """The annotation with the standard library's TypedDicts, which pydantic reads from Python 3.12 on, rewritten."""
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        import typing_extensions

        keys = {}
        for key, hint in typing.get_type_hints(annotation, include_extras=True).items():
            while typing.get_origin(hint) in (typing.Required, typing.NotRequired):
                (hint,) = typing.get_args(hint)  # noqa: PLW2901
            kind = typing.Required if key in annotation.__required_keys__ else typing.NotRequired
            keys[key] = kind[_readable(hint)]
        return typing_extensions.TypedDict(annotation.__name__, keys)  # type: ignore[operator]
    parts = typing.get_args(annotation)
    changed = tuple(_readable(part) for part in parts)
    if all(new is old for new, old in zip(changed, parts, strict=True)):
        return annotation
    if isinstance(annotation, types.UnionType):
        return functools.reduce(operator.or_, changed)
    origin = typing.Annotated if hasattr(annotation, "__metadata__") else typing.get_origin(annotation)
    return origin[changed]


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and those of its parameters; Google, numpy and reST styles."""
    while isinstance(function, functools.partial):
        function = function.func
    written = inspect.getdoc(function) or ""
    if not written:
        return "", {}
    import docstring_parser

    try:
        parsed = docstring_parser.parse(written)
    except docstring_parser.ParseError:
        return written, {}
    parts = (parsed.short_description, parsed.long_description)
    text = "\n\n".join(part.strip() for part in parts if part)
    return text, {p.arg_name: " ".join(p.description.split()) for p in parsed.params if p.description}


def _parameters(schema: Mapping[str, Any], documented: Mapping[str, str]) -> dict[str, Any]:
    """pydantic's schema in the form that models are shown: no titles, references written out."""
    defs: dict[str, Any] = dict(schema.get("$defs", {}))
    recursive = any(_reaches(name, defs[name], defs, set()) for name in defs)
    properties = {}
    for name, written in schema.get("properties", {}).items():
        node = _tidy(written, {} if recursive else defs)
        if name in documented and "description" not in node:
            node["description"] = documented[name]
        properties[name] = node
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if schema.get("required"):
        out["required"] = list(schema["required"])
    if recursive:
        out["$defs"] = {name: _tidy(node, {}) for name, node in defs.items()}
    return out


def _reaches(goal: str, node: object, defs: Mapping[str, Any], seen: set[str]) -> bool:
    """Whether a definition leads back to itself, so that it cannot be written out in place."""
    if isinstance(node, list):
        return any(_reaches(goal, part, defs, seen) for part in node)
    if not isinstance(node, dict):
        return False
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        if name == goal:
            return True
        if name in defs and name not in seen:
            seen.add(name)
            if _reaches(goal, defs[name], defs, seen):
                return True
    return any(_reaches(goal, part, defs, seen) for part in node.values())


def _tidy(node: Any, defs: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_tidy(part, defs) for part in node]
    if not isinstance(node, dict):
        return node
    node = dict(node)
    name = str(node.get("$ref", "")).rpartition("/")[2]
    if name in defs:
        del node["$ref"]
        node = {**defs[name], **node}
        node.pop("discriminator", None)
    if defs:
        node.pop("discriminator", None)  # it points at definitions that are gone
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            out[key] = {inner: _tidy(part, defs) for inner, part in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        else:
            out[key] = _tidy(value, defs)
    return out

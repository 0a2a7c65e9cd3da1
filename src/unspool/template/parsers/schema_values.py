"""Typed values from the plain text of XML-like formats, by the JSON schema of the tool that is called.

Text says nothing of its type: `42` is a number only if the schema says so. Where the schema says nothing (no such tool,
no such parameter, no type), the text stays text. A scalar that does not fit its type stays text as well, for checking
arguments against the schema, and the sentence about it, belong to whoever runs the tool; an object or list that is not
JSON is refused here, with the place where its JSON breaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.template.parsers.json_calls import MAX_DIGITS, decode_at, skip_blank
from unspool.types import InvalidValueError, ToolInfo

_INTEGER = re.compile(r"[+-]?[0-9]++(?:\.0*+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
_MAX_HOPS = 8


def functions(tools: Sequence[ToolInfo] | None) -> dict[str, Mapping[str, Any]]:
    """The parameters schema of each tool by its name, from tools in OpenAI's form or without its envelope."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            schema = inner.get("parameters")
            found[inner["name"]] = schema if isinstance(schema, Mapping) else {}
    return found


def typed(text: str, parameter: str, schema: Mapping[str, Any], *, untyped_json: bool = False) -> Any:
    """The value of `parameter` that `text` writes, by the tool's parameters `schema`.

    Types are tried from the narrowest to the widest: null, boolean, integer, number, object and list, string.
    `untyped_json`: where the schema names no type, text that is JSON (other than a string) is decoded.

    Raises:
        InvalidValueError: the schema wants an object or a list and no string, and the text is not one in JSON.
    """
    types = _types(_property(parameter, schema), schema, _MAX_HOPS)
    word = text.strip()
    if untyped_json and not types:
        decoded = decode_at(word, 0)
        whole = decoded.error is None and decoded.end == len(word)
        return text if not whole or isinstance(decoded.value, str) else decoded.value
    lowered = word.lower() if len(word) <= 5 else ""
    if "null" in types and lowered in ("null", "none"):
        return None
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if ("integer" in types or "number" in types) and _INTEGER.fullmatch(word):
        digits = word.partition(".")[0]
        # 5.0 is an integer to JSON schema; where any number will do it stays the float that was written.
        if len(digits) <= MAX_DIGITS and ("integer" in types or digits == word):
            return int(digits)
    if "number" in types and _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    if "object" in types or "array" in types:
        decoded = decode_at(word, 0)
        whole = decoded.error is None and skip_blank(word, decoded.end) == len(word)
        if whole and isinstance(decoded.value, dict if "object" in types else list):
            return decoded.value
        if whole and isinstance(decoded.value, list) and "array" in types:
            return decoded.value
        if types <= {"object", "array", "null"}:
            reason = decoded.error or f"it must be a JSON {' or '.join(sorted(types - {'null'}))}"
            raise InvalidValueError(f"parameter {parameter}: {reason}")
    return text


def _property(parameter: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(parameter) if isinstance(properties, Mapping) else None
    if found is None:
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: object, root: Mapping[str, Any], hops: int) -> set[str]:
    """The JSON types that a schema allows, as far as it names any."""
    if not isinstance(schema, Mapping) or hops == 0:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, (list, tuple)):
        types |= {item for item in declared if isinstance(item, str)}
    for branches in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if isinstance(branches, (list, tuple)):
            types = types.union(*(_types(branch, root, hops - 1) for branch in branches))
    if "$ref" in schema:
        types |= _types(_target(schema["$ref"], root), root, hops - 1)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = {_type_of(value) for value in values} if isinstance(values, (list, tuple)) else set()
    if types and schema.get("nullable") is True:
        types.add("null")
    return types


def _target(reference: object, root: Mapping[str, Any]) -> object:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node: object = root
    for part in reference[2:].split("/"):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part.replace("~1", "/").replace("~0", "~"))
    return node


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "string")

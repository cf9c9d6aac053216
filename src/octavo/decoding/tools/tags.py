"""Parameters between tags: a string is written as it is, so that the schema alone says what a value is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["parameter_value", "tagged_value"]

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"), (str, "string"),
)  # fmt: skip
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as some models write them
_MOST_REFERENCES = 8
_BOUNDS = ("pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf")


def tagged_value(text: str, schema: Mapping[str, Any], key: str) -> str:
    """A parameter's text as JSON: a string, unless its schema takes no strings, or takes what it is besides.

    Where the schema does not say, what can be read as JSON is JSON.
    """
    properties = schema.get("properties")
    types = _types(_resolved(properties.get(key) if isinstance(properties, Mapping) else None, schema))
    plain = _WORDS.get(text.strip(), text.strip())
    kind = _kind(plain)
    may_be = not types or kind in types or (kind == "integer" and "number" in types)
    return plain if may_be and kind not in ("", "string") else json.dumps(text, ensure_ascii=False)


def parameter_value(schema: Any, within: Mapping[str, Any], place: str) -> list[str] | None:
    """How a parameter is enforced: None by its schema, as JSON; else the texts that it may be, any text if empty.

    Raises ``InvalidInput`` for bounds on strings, and for what may be a string or not.
    """
    found = _resolved(schema, within)
    types = _types(found)
    if types and "string" not in types:
        return None
    odd = next((name for name in _BOUNDS if name in found), None)
    if odd is not None or types != {"string"}:
        raise InvalidInput(place, odd, f"{odd or 'type'} cannot be enforced between tags; use one type, or enum")
    texts = [found["const"]] if "const" in found else list(found.get("enum", ()))
    if not all(isinstance(text, str) and "</parameter>" not in text for text in texts):
        raise InvalidInput(place, "enum", "enum cannot be enforced between tags; give texts without </parameter>")
    return texts


def _resolved(schema: Any, within: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its references; an empty one where they lead nowhere."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        _, _, path = reference.partition("#/")
        schema = within
        for name in path.split("/"):
            schema = schema.get(name, {}) if isinstance(schema, Mapping) else {}
    return {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, empty where the schema does not say."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_type(value) for value in values} if isinstance(values, list) else set()


def _kind(text: str) -> str:
    """The type of a JSON text, empty if it is none."""
    try:
        return _type(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError):
        return ""


def _type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _no_number(name: str) -> None:
    raise ValueError(name)

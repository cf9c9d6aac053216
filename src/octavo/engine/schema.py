"""The JSON schemas of models, requests, events, quantization, scenarios and fixtures, and a validator for them.

The schemas are data (``schemas/*.json``, JSON Schema 2020-12). The validator knows the keywords that they use and
refuses any other, so a schema cannot promise what is not checked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput

SCHEMA_NAMES = ("model", "request", "event", "quantization", "scenario", "fixture")
_FOLDER = Path(__file__).parent / "schemas"
_NOTES = frozenset({"$schema", "title", "description"})
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@functools.cache
def load_schema(name: str) -> Mapping[str, Any]:
    """The schema called ``name`` (see ``SCHEMA_NAMES``). Raises ``InvalidInput`` for another name."""
    if name not in SCHEMA_NAMES:
        raise InvalidInput("schema", name, "use one of " + ", ".join(SCHEMA_NAMES))
    loaded: Mapping[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def validate(value: object, schema: str | Mapping[str, Any], path: str = "$") -> None:
    """Check ``value`` (plain JSON values) against a schema or its name.

    Raises ``InvalidInput`` whose field is the path of the first value that does not fit, such as ``$.requests[2].id``.
    """
    rules = load_schema(schema) if isinstance(schema, str) else schema
    for keyword, rule in rules.items():
        if keyword not in _NOTES:
            _keyword(keyword)(value, rule, rules, path)


def _is_type(value: object, name: str) -> bool:
    # JSON keeps true and 1 apart; Python does not
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _fail(path: str, value: object, remedy: str) -> None:
    raise InvalidInput(path, value, remedy)


def _check_ref(value: object, rule: str, rules: Mapping[str, Any], path: str) -> None:
    validate(value, rule.removesuffix(".json"), path)


def _check_type(value: object, rule: str | list[str], rules: Mapping[str, Any], path: str) -> None:
    names = [rule] if isinstance(rule, str) else rule
    if not any(_is_type(value, name) for name in names):
        _fail(path, value, "must be of type " + " or ".join(names))


def _check_enum(value: object, rule: list[Any], rules: Mapping[str, Any], path: str) -> None:
    if not any(value == item and type(value) is type(item) for item in rule):
        _fail(path, value, f"must be one of {rule}")


def _check_const(value: object, rule: object, rules: Mapping[str, Any], path: str) -> None:
    if value != rule:
        _fail(path, value, f"must be {rule!r}")


def _check_required(value: object, rule: list[str], rules: Mapping[str, Any], path: str) -> None:
    missing = [name for name in rule if isinstance(value, dict) and name not in value]
    if missing:
        _fail(path, sorted(value) if isinstance(value, dict) else value, "add " + ", ".join(missing))


def _check_properties(value: object, rule: Mapping[str, Any], rules: Mapping[str, Any], path: str) -> None:
    if isinstance(value, dict):
        for name, inner in rule.items():
            if name in value:
                validate(value[name], inner, f"{path}.{name}")


def _check_additional(value: object, rule: Any, rules: Mapping[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        return
    known = rules.get("properties", {})
    for name in value:
        if name not in known:
            if rule is False:
                _fail(f"{path}.{name}", value[name], "unknown; known names: " + ", ".join(known))
            validate(value[name], rule, f"{path}.{name}")


def _check_items(value: object, rule: Mapping[str, Any], rules: Mapping[str, Any], path: str) -> None:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            validate(item, rule, f"{path}[{index}]")


def _number(check: Callable[[float, float], bool], words: str) -> Callable[..., None]:
    def run(value: object, rule: float, rules: Mapping[str, Any], path: str) -> None:
        if _is_type(value, "number") and not check(value, rule):  # type: ignore[arg-type]
            _fail(path, value, f"must be {words} {rule}")

    return run


def _length(kinds: tuple[type, ...], words: str) -> Callable[..., None]:
    def run(value: object, rule: int, rules: Mapping[str, Any], path: str) -> None:
        if isinstance(value, kinds) and len(value) < rule:  # type: ignore[arg-type]
            _fail(path, value, f"needs at least {rule} {words}")

    return run


_KEYWORDS: dict[str, Callable[..., None]] = {
    "$ref": _check_ref,
    "type": _check_type,
    "enum": _check_enum,
    "const": _check_const,
    "required": _check_required,
    "properties": _check_properties,
    "additionalProperties": _check_additional,
    "items": _check_items,
    "minimum": _number(lambda a, b: a >= b, "at least"),
    "maximum": _number(lambda a, b: a <= b, "at most"),
    "exclusiveMinimum": _number(lambda a, b: a > b, "above"),
    "minItems": _length((list, tuple), "item(s)"),
    "minLength": _length((str,), "character(s)"),
}


def _keyword(name: str) -> Callable[..., None]:
    if name not in _KEYWORDS:
        raise InvalidInput("schema keyword", name, "use one of " + ", ".join(_KEYWORDS))
    return _KEYWORDS[name]

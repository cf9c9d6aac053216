"""JSON schemas under limits, and which of their keywords are honoured. What is not honoured is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["FORMATS", "HONOURED", "MAX_DEPTH", "MAX_ENUM", "MAX_NODES", "checked_schema"]

MAX_DEPTH, MAX_NODES, MAX_ENUM = 32, 4096, 2048
_SAID = frozenset(  # constrain nothing
    ("$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_ONE = ("items", "additionalProperties", "additionalItems")  # whose value is a schema
_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAP = ("properties", "patternProperties", "$defs", "definitions")
HONOURED = frozenset(
    (
        *("type", "enum", "const", "$ref", "required", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
        *("minProperties", "maxProperties", *_ONE, *_LIST, *_MAP),
    )
)
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)  # fmt: skip


def checked_schema(source: str) -> Any:
    """The schema in a JSON text. Raises ``InvalidInput`` naming the place and the keyword that cannot be honoured."""
    try:
        schema = json.loads(source, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("json_schema", str(error)[:80], "give JSON") from None
    _check_size(schema)
    for place, part in _schemas(schema):
        _check_part(place, part)
    return schema


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_size(schema: Any) -> None:
    stack, nodes = [(schema, 1)], 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise InvalidInput("json_schema", f"depth {depth}", f"give at most {MAX_DEPTH} levels")
        children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        stack += [(child, depth + 1) for child in children if isinstance(child, (dict, list))]
        nodes += sum(not isinstance(child, (dict, list)) for child in children)
        if nodes > MAX_NODES:
            raise InvalidInput("json_schema", f"more than {MAX_NODES} values", f"give at most {MAX_NODES}")


def _schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """(place, schema) of the schema and of all within it."""
    stack = [("#", schema)]
    while stack:
        place, part = stack.pop()
        yield place, part
        if not isinstance(part, dict):
            continue
        stack += [(f"{place}/{name}", part[name]) for name in _ONE if name in part]
        for name in _LIST:
            if name in part:
                stack += [(f"{place}/{name}/{i}", item) for i, item in enumerate(_listed(place, name, part[name]))]
        for name in _MAP:
            if name in part:
                stack += [(f"{place}/{name}/{key}", item) for key, item in _mapped(place, name, part[name]).items()]


def _listed(place: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"json_schema {place}/{name}", value, "give a list of schemas, at least one")
    return value


def _mapped(place: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"json_schema {place}/{name}", value, "give an object of schemas")
    return value


def _check_part(place: str, part: Any) -> None:
    if isinstance(part, bool):
        return
    if not isinstance(part, dict):
        raise InvalidInput(f"json_schema {place}", part, "give a schema: an object, true or false")
    for name in part:
        if name not in HONOURED and name not in _SAID:
            raise InvalidInput(f"json_schema {place}/{name}", name, "this keyword is not supported; leave it out")
    if isinstance(part.get("items"), list):
        raise InvalidInput(f"json_schema {place}/items", "a list", "give the schemas of single items as prefixItems")
    ref = part.get("$ref", "#")
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise InvalidInput(f"json_schema {place}/$ref", ref, "a reference stays within the schema: #/$defs/name")
    if part.get("format", FORMATS[0]) not in FORMATS:
        remedy = f"this format is not supported; known: {', '.join(FORMATS)}"
        raise InvalidInput(f"json_schema {place}/format", part["format"], remedy)
    _check_bounds(place, part)
    _check_count(place, part)
    if "enum" in part and (not isinstance(part["enum"], list) or not 1 <= len(part["enum"]) <= MAX_ENUM):
        raise InvalidInput(f"json_schema {place}/enum", "a list", f"give 1 to {MAX_ENUM} values")


def _check_bounds(place: str, part: Mapping[str, Any]) -> None:
    """The library takes a whole bound that is excluded for included where the other bound is less than 1 away."""
    names = ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum")
    bounds = [part.get(name) for name in names]
    for name, bound in zip(names, bounds, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float))):
            raise InvalidInput(f"json_schema {place}/{name}", bound, "give a number")
    lows, highs = [b for b in bounds[:2] if b is not None], [b for b in bounds[2:] if b is not None]
    if part.get("type") == "integer" or not lows or not highs or max(lows) >= min(highs):
        return
    for name, bound in (("exclusiveMinimum", bounds[0]), ("exclusiveMaximum", bounds[2])):
        if bound is not None and bound == int(bound) and min(highs) - max(lows) < 1:
            remedy = "this bound is a whole number and the other one less than 1 away: that is not supported"
            raise InvalidInput(f"json_schema {place}/{name}", bound, remedy)


def _check_count(place: str, part: Mapping[str, Any]) -> None:
    """Where names are free, a grammar cannot keep one from coming twice."""
    least, required = part.get("minProperties", 0), part.get("required", ())
    is_free = part.get("additionalProperties") is not False or "patternProperties" in part
    if is_free and isinstance(least, int) and isinstance(required, (list, tuple)) and least > max(1, len(required)):
        remedy = "more than 1 is not supported where names are free; name the properties in required"
        raise InvalidInput(f"json_schema {place}/minProperties", least, remedy)

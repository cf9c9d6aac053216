"""JSON schemas under limits, and which of their keywords are honoured. What is not honoured is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.decoding.grammar.dead_ends import DeadEnds

__all__ = ["FORMATS", "HONOURED", "MAX_DEPTH", "MAX_ENUM", "MAX_NODES", "MAX_RESIDUES", "checked_schema", "ending"]

MAX_DEPTH, MAX_NODES, MAX_ENUM = 32, 4096, 2048
MAX_RESIDUES = 20_000  # that an automaton for all `multipleOf` of a schema tells apart
_MAX_BOUND = 10**18  # the library's numbers have 64 bits
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SAID = frozenset(  # constrain nothing
    ("$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_ONE = ("items", "additionalProperties", "additionalItems")  # whose value is a schema
_JOINED = ("anyOf", "oneOf", "allOf")
_LIST = ("prefixItems", *_JOINED)
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
    return ending(schema)


def ending(schema: Any) -> Any:
    """A schema in whose language no way goes on for ever: false stands for each part that nothing fits.

    Raises ``InvalidInput`` naming a part, if nothing fits the whole; or if its multiples need too large an automaton.
    """
    parts = [(place, part) for place, part in _schemas(schema) if isinstance(part, dict)]
    children = {id(part): [child for _, child in _within(place, part)] for place, part in parts}
    dead = DeadEnds(schema, [part for _, part in parts], children)
    _check_multiples([(place, part) for place, part in parts if "multipleOf" in part], parts, dead)
    if not dead:
        return schema
    if not dead.ends(schema):
        empty = [(place, part) for place, part in parts if not dead.ends(part)]
        blamed = next((f"{place}/$ref" for place, part in empty if "$ref" in part), empty[0][0])
        raise InvalidInput(f"json_schema {blamed}", None, "nothing fits it: what it must hold is false, or never ends")
    return dead.without(schema)


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
    """(place, schema) of the schema and of all within it, each before those within it."""
    stack = [("#", schema)]
    while stack:
        place, part = stack.pop()
        yield place, part
        stack += _within(place, part)


def _within(place: str, part: Any) -> list[tuple[str, Any]]:
    """(place, schema) of those directly within a schema."""
    if not isinstance(part, dict):
        return []
    found = [(f"{place}/{name}", part[name]) for name in _ONE if name in part]
    for name in _LIST:
        if name in part:
            found += [(f"{place}/{name}/{i}", item) for i, item in enumerate(_listed(place, name, part[name]))]
    for name in _MAP:
        if name in part:
            found += [(f"{place}/{name}/{key}", item) for key, item in _mapped(place, name, part[name]).items()]
    return found


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
    names = ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum", "multipleOf")
    bounds = [part.get(name) for name in names]
    for name, bound in zip(names, bounds, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float))):
            raise InvalidInput(f"json_schema {place}/{name}", bound, "give a number")
        if bound is not None and not -_MAX_BOUND <= bound <= _MAX_BOUND:
            raise InvalidInput(
                f"json_schema {place}/{name}", "a number", f"give one from -{_MAX_BOUND} to {_MAX_BOUND}"
            )
    if bounds[4] is not None and bounds[4] <= 0:
        raise InvalidInput(f"json_schema {place}/multipleOf", bounds[4], "give a number above 0")
    lows, highs = [b for b in bounds[:2] if b is not None], [b for b in bounds[2:4] if b is not None]
    if part.get("type") == "integer" or not lows or not highs or max(lows) >= min(highs):
        return
    for name, bound in (("exclusiveMinimum", bounds[0]), ("exclusiveMaximum", bounds[2])):
        if bound is not None and bound == int(bound) and min(highs) - max(lows) < 1:
            remedy = "this bound is a whole number and the other one less than 1 away: that is not supported"
            raise InvalidInput(f"json_schema {place}/{name}", bound, remedy)


def _check_multiples(asked: Sequence[tuple[str, Any]], parts: Sequence[tuple[str, Any]], dead: DeadEnds) -> None:
    """An automaton that reads digits keeps the remainder; where parts are joined, one for each of them."""
    joined = {id(child) for _, part in parts for name in _JOINED for child in part.get(name, ())}
    wholes = [part for _, part in parts if id(part) not in joined and set(part) != {"$ref"}]
    known: dict[int, int] = {}
    try:
        total = sum(found for part in wholes if (found := _residues(part, dead, known)) > 1) if asked else 0
    except RecursionError:
        total = MAX_RESIDUES + 1
    if total > MAX_RESIDUES:
        place, part = max(asked, key=lambda one: _digits(one[1]["multipleOf"]))
        remedy = f"with what is beside it, it needs an automaton of more than {MAX_RESIDUES} states; give smaller ones"
        raise InvalidInput(f"json_schema {place}/multipleOf", part["multipleOf"], remedy)


def _residues(part: Any, dead: DeadEnds, known: dict[int, int]) -> int:
    """How many remainders the multiples that a part asks for tell apart, at most ``MAX_RESIDUES`` + 1."""
    if not isinstance(part, dict):
        return 1
    if id(part) not in known:
        known[id(part)] = 1  # for references back to it
        count = _digits(part.get("multipleOf", 1)) * _residues(dead.target(part), dead, known)
        for item in part.get("allOf", ()):
            count *= _residues(item, dead, known)
        for name in ("anyOf", "oneOf"):
            count *= max(1, sum(found for item in part.get(name, ()) if (found := _residues(item, dead, known)) > 1))
        known[id(part)] = min(count, MAX_RESIDUES + 1)
    return known[id(part)]


def _digits(factor: Any) -> int:
    """A number without its point and the zeros at its end: 2500 and 2.5 are 25."""
    return int("".join(map(str, Decimal(repr(factor)).normalize().as_tuple().digits)))


def _check_count(place: str, part: Mapping[str, Any]) -> None:
    """Where names are free, a grammar cannot keep one from coming twice."""
    for name in _COUNTS:
        value = part.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_BOUND:
            raise InvalidInput(f"json_schema {place}/{name}", "a count", f"give a whole number from 0 to {_MAX_BOUND}")
    least, required = part.get("minProperties", 0), part.get("required", ())
    is_free = part.get("additionalProperties") is not False or "patternProperties" in part
    if is_free and isinstance(least, int) and isinstance(required, (list, tuple)) and least > max(1, len(required)):
        remedy = "more than 1 is not supported where names are free; name the properties in required"
        raise InvalidInput(f"json_schema {place}/minProperties", least, remedy)

"""JSON schemas for tests: families over every keyword that is honoured, alone, nested and together. All are ours."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_TEXTS = ["", "a", "é", "日本", "🙂", 'q"q', "b\\s", "t\tn\n", "\u2028", "/", "null"]
_VALUES: list[Any] = [None, True, False, 0, -1, 1.5, 10**12, "x", "", [], [1, "a"], {}, {"k": [None]}, *_TEXTS]


def _obj(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


def numbers() -> Iterator[Schema]:
    """Types, bounds on both sides, open and closed, and multiples."""
    for low, high in [(0, 0), (0, 9), (-5, 5), (7, 123), (-1000, -998), (99, 101), (0, 2**31 - 1), (-(10**15), 10**15)]:
        yield {"type": "integer", "minimum": low, "maximum": high}
        yield {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        yield {"type": "number", "minimum": low, "maximum": high}
    for low, high in [
        (0.5, 0.75),
        (-1.25, 3),
        (0.25, 9),
        (1e-3, 1e3),
        (-2.5, -2.25),
        (0.001, 0.002),
        (-7, -1.5),
        (0, 1),
    ]:
        yield {"type": "number", "minimum": low, "maximum": high}
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for bound in (0, -3, 17, 1000, -99):
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            yield {"type": "integer", name: bound}
            yield {"type": "number", name: bound}
    for factor in (1, 2, 3, 5, 7, 10, 25):
        yield {"type": "integer", "multipleOf": factor}
        yield {"type": "integer", "multipleOf": factor, "minimum": 0, "maximum": 500}


def strings() -> Iterator[Schema]:
    """Lengths, patterns with and without anchors, formats."""
    for low, high in [(0, 0), (0, 3), (1, 1), (2, 5), (4, 4), (0, 40), (10, 12)]:
        yield {"type": "string", "minLength": low, "maxLength": high}
    yield from ({"type": "string", "minLength": low} for low in (1, 5))
    for pattern in [
        *("^[a-z]+$", "^[A-Z]{2}[0-9]{3}$", "^(yes|no)$", "^a.c$", "^[^x]{1,4}$", r"^\d{4}-\d{2}$", r"^\w+@\w+$", "^$"),
        *(
            "abc",
            "^ab",
            "ab$",
            "[0-9]",
            "^é+$",
            "^日本?$",
            r"^\"\\$",
            "^(a|b(c|d)*){1,3}$",
            r"^\s?x\s?$",
            "^[0-9a-f]{8}$",
        ),
    ]:
        yield {"type": "string", "pattern": pattern}
    formats = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    yield from ({"type": "string", "format": name} for name in formats)
    yield {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6}
    yield {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 6}


def choices() -> Iterator[Schema]:
    """Enumerations and constants, of every type and of odd texts; types as lists."""
    yield from ({"const": value} for value in _VALUES)
    yield from ({"enum": [value, "other"]} for value in _VALUES if value != "other")
    yield {"enum": _VALUES}
    yield {"enum": [f"option {i}" for i in range(300)]}
    names = ["null", "boolean", "integer", "number", "string", "array", "object"]
    yield from ({"type": name} for name in names)
    yield from ({"type": list(pair)} for pair in itertools.combinations(names, 2))
    yield {"type": "string", "enum": ["a", "b"]}
    yield {}


def arrays() -> Iterator[Schema]:
    """Lengths, items, tuples, nesting."""
    item: Schema
    for item in (
        {"type": "integer"},
        {"type": "string", "maxLength": 3},
        {"enum": [1, "a", None]},
        {"type": "boolean"},
    ):
        yield {"type": "array", "items": item}
        for low, high in [(0, 0), (1, 1), (0, 2), (2, 3), (3, 3), (1, 6)]:
            yield {"type": "array", "items": item, "minItems": low, "maxItems": high}
    ends: list[Any]
    ends = [{"type": "null"}, False, True, {"type": "integer", "minimum": 5, "maximum": 8}]
    for rest in ends:
        yield {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "é"}], "items": rest, "maxItems": 4}
        yield {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"const": "é"}],
            "items": rest,
            "minItems": 2,
            "maxItems": 3,
        }
    nested: Schema = {"type": "boolean"}
    for _ in range(6):
        nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 2}
        yield nested


def objects() -> Iterator[Schema]:
    """Properties, required ones, others by pattern or schema, counts, odd names."""
    three: Schema = {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"enum": ["x", "y"]}}
    for count in range(4):
        for required in itertools.combinations(three, count):
            yield {"type": "object", "properties": three, "required": list(required), "additionalProperties": False}
    for more in ({"type": "integer"}, {"type": "string", "maxLength": 2}, {"enum": [None]}, False):
        yield {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": more}
        yield {"type": "object", "additionalProperties": more}
        yield {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": more,
        }
    yield from (_obj({name: {"type": "integer"}}) for name in _TEXTS)
    yield {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    yield {"type": "object", "patternProperties": {"^[0-9]+$": {"type": "boolean"}}, "additionalProperties": False}
    for low, high in [(0, 0), (1, 1), (1, 2), (0, 3), (1, 4)]:
        yield {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": low,
            "maxProperties": high,
        }
    for least in (1, 2):
        yield {"type": "object", "properties": three, "required": list(three), "minProperties": least}
    nested = _obj({"leaf": {"type": "null"}})
    for depth in range(8):
        nested = _obj({f"level {depth}": nested, "also": {"type": "boolean"}})
        yield nested


def combinations_of() -> Iterator[Schema]:
    """anyOf, oneOf of what excludes itself, allOf."""
    parts: list[Schema] = [
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        _obj({"kind": {"const": "é"}, "value": {"type": "integer"}}),
    ]
    for pair in itertools.combinations(parts, 2):
        yield {"anyOf": list(pair)}
        yield {"oneOf": list(pair)}
        yield _obj(
            {"either": {"anyOf": list(pair)}, "list": {"type": "array", "items": {"oneOf": list(pair)}, "maxItems": 2}}
        )
    yield from ({"allOf": [part]} for part in parts)
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}
    yield {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 4}]}
    yield {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"const": 1}}, "required": ["b"]},
        ]
    }
    kinds = [_obj({"kind": {"const": name}, name: {"type": "integer"}}) for name in ("circle", "square", "dreieck")]
    yield {"oneOf": kinds}
    yield {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": 3}


def references() -> Iterator[Schema]:
    """$ref into $defs and definitions, shared, through others, and recursive."""
    for place in ("$defs", "definitions"):
        yield {"$ref": f"#/{place}/n", place: {"n": {"type": "integer", "minimum": 1, "maximum": 3}}}
        yield _obj(
            {"a": {"$ref": f"#/{place}/s"}, "b": {"$ref": f"#/{place}/s"}}, **{place: {"s": {"enum": ["é", "b"]}}}
        )
        yield {
            place: {"a": {"$ref": f"#/{place}/b"}, "b": {"type": "boolean"}},
            "type": "array",
            "items": {"$ref": f"#/{place}/a"},
            "maxItems": 3,
        }
        tree = _obj(
            {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": f"#/{place}/t"}, "maxItems": 2}}
        )
        yield {"$ref": f"#/{place}/t", place: {"t": tree}}
        chain = {"anyOf": [{"type": "null"}, _obj({"next": {"$ref": f"#/{place}/c"}})]}
        yield {"$ref": f"#/{place}/c", place: {"c": chain}}
    yield {"type": "object", "properties": {"self": {"$ref": "#"}}, "additionalProperties": False}
    yield {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    value: Schema = {
        "anyOf": [
            {"type": "integer"},
            {"type": "string", "maxLength": 3},
            {"type": "array", "items": {"$ref": "#/$defs/v"}, "maxItems": 2},
        ]
    }
    yield {"$ref": "#/$defs/v", "$defs": {"v": value}}


def larger() -> Iterator[Schema]:
    """As people write them: records of many kinds of values."""
    word: Schema = {"type": "string", "pattern": "^[a-zé ]{1,8}$"}
    plain: list[Schema] = [
        word,
        {"type": "integer", "minimum": 0, "maximum": 130},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"enum": ["red", "grün"]},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 4},
        {"type": "string", "format": "date"},
        {"type": "array", "items": word, "maxItems": 2},
    ]
    for i, (first, second, third) in enumerate(itertools.combinations(plain, 3)):
        record = _obj({f"first {i}": first, "second": second, "third": third}, title="record", description="é")
        yield record if i % 3 else {"type": "array", "items": record, "minItems": 1, "maxItems": 2}


FAMILIES = (numbers, strings, choices, arrays, objects, combinations_of, references, larger)


def schemas() -> list[tuple[str, Schema]]:
    """(name, schema) of all, each once."""
    found: dict[str, str] = {}
    for family in FAMILIES:
        for i, schema in enumerate(family()):
            found.setdefault(json.dumps(schema, sort_keys=True), f"{family.__name__}-{i}")
    return [(name, json.loads(text)) for text, name in found.items()]

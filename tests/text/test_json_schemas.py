"""The JSON-schema suite: what the masks let through at random fits its schema. No model is needed.

OCTAVO_SCHEMAS=all (`make test-grammars`): every schema, from several seeds and both vocabularies; else a part of them.
"""

import json
import os
import random
import re

import pytest
from grammar_walk import compiler, text_of, walk
from jsonschema import Draft202012Validator, FormatChecker
from schema_families import schemas

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.schema import FORMATS, HONOURED

SCHEMAS = schemas()
EVERY = os.environ.get("OCTAVO_SCHEMAS") == "all"
SEEDS, STRIDE = (8, 1) if EVERY else (1, 6)
_CHECKER = FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SHAPES = {
    "time": _TIME,
    "date-time": rf"\d{{4}}-\d\d-\d\d[Tt]{_TIME}",
    "duration": r"P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:\S*",
}


def keywords(schema, found):
    if isinstance(schema, dict):
        found |= set(schema)
        for value in schema.values():
            keywords(value, found)
    elif isinstance(schema, list):
        for value in schema:
            keywords(value, found)
    return found


def test_there_are_enough_schemas_over_every_keyword():
    assert len(SCHEMAS) >= 400
    assert HONOURED - keywords([schema for _, schema in SCHEMAS], set()) <= {"additionalItems"}
    assert set(FORMATS) == {schema["format"] for _, schema in SCHEMAS if "format" in schema}
    assert set(_SHAPES) | set(_CHECKER.checkers) >= set(FORMATS)


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_what_is_drawn_at_random_fits_its_schema(kind):
    """Every completed output validates; nearly all are completed."""
    ended = total = 0
    for name, schema in SCHEMAS[::STRIDE]:
        source = json.dumps(schema, ensure_ascii=False)
        if kind == "characters" and not (source.isascii() and "\\u" not in json.dumps(schema)):
            continue  # this vocabulary lacks what the schema asks for
        for seed in range(SEEDS):
            ids, end = walk(Grammar("json_schema", source), random.Random(f"{name} {seed}"), kind=kind)
            ended, total = ended + end, total + 1
            if end:
                text = text_of(ids, kind)
                value = json.loads(text)
                Draft202012Validator(schema, format_checker=_CHECKER).validate(value)
                if schema.get("format") in _SHAPES:
                    assert re.fullmatch(_SHAPES[schema["format"]], value), (name, text)
    assert ended > 0.9 * total > 0


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not"), ({"if": {}, "then": {}}, "if"),
    ({"type": "array", "contains": {}}, "contains"), ({"propertyNames": {}}, "propertyNames"),
    ({"dependentRequired": {}}, "dependentRequired"), ({"$dynamicRef": "#x"}, "$dynamicRef"), ({"foo": 1}, "foo"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"), ({"format": "idn-email"}, "format"),
    ({"properties": {"a": {"items": {"anyOf": [{"uniqueItems": True}]}}}}, "uniqueItems"),
    ({"$defs": {"unused": {"not": {}}}}, "not"), ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"minimum": "3"}, "minimum"), ({"items": [{}]}, "items"), ({"anyOf": []}, "anyOf"), ({"anyOf": {}}, "anyOf"),
    ({"properties": []}, "properties"), ({"properties": {"a": 3}}, "a"), ({"enum": []}, "enum"),
    ({"$ref": "x"}, "$ref"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "name"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(schema, name):
    with pytest.raises(InvalidInput) as caught:
        compiler().matcher(Grammar("json_schema", json.dumps(schema)))
    assert caught.value.field.endswith(f"/{name}"), caught.value


HOSTILE = [
    "[" * 30000, json.dumps({"enum": list(range(100_000))})[:60000], '{"a": 1e999}', "NaN", "3", '"x"', "null", "false",
    json.dumps({"enum": list(range(2049))}), json.dumps({"anyOf": [{"const": i} for i in range(3000)]}),
    json.dumps({"$ref": "#"}), json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    json.dumps({"$ref": "#/$defs/none"}), json.dumps({"type": "foo"}), json.dumps({"type": 3}),
    json.dumps({"type": "integer", "minimum": 5, "maximum": 4}), json.dumps({"type": "string", "pattern": "("}),
    json.dumps({"type": "string", "pattern": "(?=a)b"}), json.dumps({"type": "integer", "minimum": -(10**30)}),
    "{" + '"items": {' * 40 + "}" * 41,
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_schemas_are_refused(source):
    with pytest.raises(InvalidInput):
        compiler().matcher(Grammar("json_schema", source))

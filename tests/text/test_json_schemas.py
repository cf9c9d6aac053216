"""The JSON-schema suite: what the masks let through at random fits its schema. No model is needed.

OCTAVO_SCHEMAS=all (`make test-grammars`): every schema, from several seeds and both vocabularies; else a part of them.
"""

import json
import os
import random
import re

import pytest
from grammar_walk import compiler, taken, text_of, walk
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from schema_families import schemas

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.schema import FORMATS, HONOURED, checked_schema

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


OBJECT = {"type": "object", "additionalProperties": False}
CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1900)} | {"1900": {}}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
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
    ({"$ref": "x"}, "$ref"), ({"$ref": "#"}, "$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
    ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, "$ref"), ({"allOf": [{}, False]}, "#"),
    ({"type": "integer", "multipleOf": 999_983}, "multipleOf"), ({"multipleOf": 0}, "multipleOf"),
    ({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991)]}, "multipleOf"),
    ({"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "anyOf": [{"multipleOf": 991}]}, "multipleOf"),
    ({"properties": {f"p{i}": {"multipleOf": 9973 - i} for i in range(9)}}, "multipleOf"),
    ({"$defs": CHAIN, "$ref": "#/$defs/0", "multipleOf": 3}, "multipleOf"),
    ({"minimum": 10**300}, "minimum"), ({"maximum": -1e300}, "maximum"), ({"maxLength": 10**30}, "maxLength"),
    ({"minItems": -1}, "minItems"), ({"minLength": 1.5}, "minLength"), ({"maxProperties": True}, "maxProperties"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "name"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(schema, name):
    with pytest.raises(InvalidInput) as caught:
        compiler().matcher(Grammar("json_schema", json.dumps(schema)))
    assert caught.value.field.replace(" ", "/").endswith(f"/{name}"), caught.value


@st.composite
def recursive_schemas(draw):
    """Schemas of three parts that may hold each other."""
    names = st.sampled_from("abc").map(lambda name: {"$ref": f"#/$defs/{name}"})
    inner = st.one_of(names, names, st.just({"type": "null"}), st.just(False))
    needed = st.sampled_from([["p"], []])
    outer = st.one_of(
        st.tuples(inner, needed).map(lambda x: {**OBJECT, "properties": {"p": x[0]}, "required": x[1]}),
        st.tuples(inner, st.integers(0, 2)).map(lambda x: {"type": "array", "items": x[0], "minItems": x[1]}),
        st.tuples(inner, inner, st.integers(0, 2)).map(
            lambda x: {"type": "array", "prefixItems": [x[0]], "items": x[1], "minItems": x[2]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda x: {"anyOf": x}),
        st.tuples(inner, names).map(lambda x: {"allOf": [x[0]], **x[1]}),
    )
    return {"$defs": {name: draw(outer) for name in "abc"}, "$ref": "#/$defs/a"}


def smallest(schema, part, levels):
    """A value that fits a part and is at most so deep, if there is one; of what `recursive_schemas` makes."""
    if levels < 0 or part is False:
        return ()
    if part.get("type") == "null":
        return (None,)
    if "$ref" in part:
        own = smallest(schema, schema["$defs"][part["$ref"][-1]], levels - 1)
        return own if all(smallest(schema, item, levels - 1) for item in part.get("allOf", ())) else ()
    if "anyOf" in part:
        return next(filter(None, (smallest(schema, item, levels - 1) for item in part["anyOf"])), ())
    if part["type"] == "object":
        found = smallest(schema, part["properties"]["p"], levels - 1) if part["required"] else ()
        return () if part["required"] and not found else ({"p": found[0]} if found else {},)
    items = [*part.get("prefixItems", ()), *[part["items"]] * 2][: part["minItems"]]
    found = [smallest(schema, item, levels - 1) for item in items]
    return ([item[0] for item in found],) if all(found) else ()


@given(recursive_schemas())
def test_a_schema_is_refused_at_the_door_exactly_where_no_finite_value_fits(schema):
    found = smallest(schema, schema, 8)  # a ref to it, and each of three parts at most twice
    try:
        left = checked_schema(json.dumps(schema))
    except InvalidInput as error:
        assert not found and "nothing fits" in error.remedy
        return
    assert found, schema
    if "allOf" not in json.dumps(schema):  # of which the least value of one part need not fit the other
        matcher = compiler().matcher(Grammar("json_schema", json.dumps(schema)))
        ids = [2 + byte for byte in json.dumps(found[0]).encode()]
        assert taken(matcher, ids) == len(ids)
    for part in left["$defs"].values():
        assert part is False or smallest(left, part, 8)


def test_no_output_enters_what_never_ends():
    """It may be left out: the library alone would offer it, and then have no end."""
    parts = {"a": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"$ref": "#/$defs/n"}}}
    schema = {"type": "object", "properties": parts, "additionalProperties": False, "$defs": {"n": NODE}}
    tags = {
        "format": {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    }
    for grammar in (Grammar("json_schema", json.dumps(schema)), Grammar("structural_tag", json.dumps(tags))):
        outputs = {text_of(walk(grammar, random.Random(seed), most=40)[0]).strip("<>") for seed in range(40)}
        assert outputs == {"{}", '{"b": []}'}


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

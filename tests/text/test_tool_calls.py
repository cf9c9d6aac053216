"""Tool calls of every dialect: read from text cut anywhere, never lost, at a cost that is linear.

`make test-dialects` cuts all 200 calls of each dialect at every place.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.decoding.pieces import Call, Piece, Whole, whole
from octavo.decoding.tools import DIALECTS, ToolDialect, ToolParser, dialect_named, dialect_of, written

EVERYWHERE = 200 if os.environ.get("OCTAVO_SPLITS") == "all" else 20  # calls that are cut at every place
NAMES = ("f", "get_weather", "a-b.c", "name")
EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
ODD = [*"ab \n\t\"'\\{}[]()<>,:;=/é✓😀\x7f", "</tool_call>", "[TOOL_CALLS]", "```", "None", "\\u0041", "<think>"]
SOUP = [
    *ODD, "<tool_call>", "<|python_tag|>", "[ARGS]", '{"name": "f"', ', "arguments": ', '{"a": 1}', "f(", "a=", "})",
    "```tool_code\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", '"}', "f[ARGS]{}",
    "get_weather()",
]  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind == 7:
        return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(3))}
    return [text(draw), draw.randrange(-(10**20), 10**20), draw.uniform(-1e30, 1e30), True, False, None][kind]


def text(draw: random.Random) -> str:
    return "".join(draw.choices(ODD, k=draw.randrange(6)))


def some_calls(draw: random.Random) -> list[Call]:
    keys = ("a", "name", "arguments", "b_1", "é")
    made = [{key: value(draw) for key in draw.sample(keys, draw.randrange(3))} for _ in range(draw.randrange(1, 3))]
    return [Call(draw.choice(NAMES), json.dumps(arguments)) for arguments in made]


Names = Collection[str]


def read(dialect: ToolDialect, pieces: Sequence[str], eager: bool = False, names: Names = NAMES) -> list[Piece]:
    parser = ToolParser(dialect, names, eager=eager)
    return [piece for part in pieces for piece in parser.push(part)] + parser.finish()


def meant(calls: Sequence[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def told(calls: Sequence[Call]) -> dict[str, Any]:
    """Schemas by which values that are written as they are can be told apart."""
    schemas: dict[str, Any] = {name: {"properties": {}} for name in NAMES}
    for call in calls:
        schemas[call.name]["properties"] |= {key: {"enum": [item]} for key, item in json.loads(call.arguments).items()}
    return schemas


def words_before(dialect: ToolDialect) -> str:
    return "" if dialect.bare else "I shall look.\n"


@EVERY
def test_calls_are_the_same_wherever_their_text_is_cut(dialect: ToolDialect) -> None:
    draw = random.Random(dialect.name)
    for number in range(200):
        calls = some_calls(draw)
        if dialect.form == "tags" and len({call.name for call in calls}) < len(calls):
            calls = calls[:1]  # both would need the same schema
        said, names = words_before(dialect) + written(dialect, calls), told(calls)
        once = whole(read(dialect, [said], names=names))
        assert meant(once.calls) == meant(calls) and once.content == words_before(dialect).rstrip()
        singly = [whole(read(dialect, list(said), eager=eager, names=names)) for eager in (False, True)]
        assert singly == [once, once]
        places = range(len(said)) if number < EVERYWHERE else draw.sample(range(len(said)), 4)
        assert all(whole(read(dialect, [said[:place], said[place:]], names=names)) == once for place in places)


WRITTEN = {  # as the models' own templates write them
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "name", "arguments": {}}\n</tool_call>',
    "smollm": '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "name", "arguments": {}}]</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "name", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "name", "arguments": {}}]',
    "mistral_named": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]name[ARGS]{}',
    "pythonic": "[f(a=1), name()]",
    "gemma": "```tool_code\nf(a=1)\nname()\n```",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}'
    "\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>name<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "json": '[{"name": "f", "arguments": {"a": 1}}, {"name": "name", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=name>\n</function>\n</tool_call>",
}  # fmt: skip


@EVERY
def test_calls_are_written_as_models_do(dialect: ToolDialect) -> None:
    assert written(dialect, [Call("f", '{"a": 1}'), Call("name", "{}")]) == WRITTEN[dialect.name]


@EVERY
def test_fragments_of_a_stream_are_what_the_whole_has(dialect: ToolDialect) -> None:
    draw = random.Random(1)
    for _ in range(20):
        said = written(dialect, some_calls(draw))
        final = whole(read(dialect, [said])).calls
        parser, pieces, growths = ToolParser(dialect, NAMES, eager=True), [], 0
        for character in said:
            pieces += parser.push(character)
            calls = whole(pieces).calls
            assert all(
                b.arguments.startswith(a.arguments) and a.name == b.name for a, b in zip(calls, final, strict=False)
            )
            growths += bool(calls) and calls[-1].arguments not in ("", final[len(calls) - 1].arguments)
        assert whole(pieces + parser.finish()).calls == final
    assert growths > 3  # it does not come all at once


@EVERY
def test_a_cut_answer_has_its_whole_calls_and_the_rest_as_text(dialect: ToolDialect) -> None:
    calls = [Call("f", '{"a": [1, "x}"], "b_1": {"c": null}}'), Call("get_weather", '{"a": true}')]
    said = written(dialect, calls)
    for place in range(len(said)):
        found = whole(read(dialect, list(said[:place])))
        count = len(found.calls)
        assert meant(found.calls) == meant(calls[:count])
        left = said[:place].rstrip().removesuffix(found.content.rstrip())
        assert whole(read(dialect, [left.rstrip()])) == Whole(calls=found.calls), place
        assert count < len(calls) or not found.content  # what a cut text has of a closing mark is nothing
        eager = whole(read(dialect, list(said[:place]), eager=True))
        assert all(b.arguments.startswith(a.arguments) for a, b in zip(eager.calls, found.calls, strict=False))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(DIALECTS.values())), st.lists(st.sampled_from(SOUP), max_size=14), st.data())
def test_any_text_is_read_the_same_however_it_is_cut_and_none_is_lost(
    dialect: ToolDialect, parts: list[str], data: st.DataObject
) -> None:
    said = "".join(parts)
    once = whole(read(dialect, [said]))
    places = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=4)))
    assert whole(read(dialect, [said[a:b] for a, b in pairwise([0, *places, len(said)])])) == once
    assert whole(read(dialect, list(said))) == once
    if not once.calls:
        assert once.content == said
    assert all(isinstance(json.loads(call.arguments), dict) for call in once.calls)


MALFORMED = [
    '{"name": "f", "arguments": {"a": 1}', '{"name": "f", "arguments": {"a": tru}}', '{"arguments": {}}', "{}",
    '{"name": "g", "arguments": {}}', '{"name": "f", "arguments": [1]}', '{"name": "f" "arguments": {}}', "{'a': 1}",
    '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": "no"}', '{"name": 1, "arguments": {}}',
    '{"name": "f", "arguments": {"a": "\n"}}', '{"name": "f", "arguments": {},}',
    '{"name": "f", "arguments": ' + "[" * 200,
]  # fmt: skip


@pytest.mark.parametrize("said", MALFORMED)
def test_what_is_no_call_comes_back_as_text(said: str) -> None:
    for name, around in (("hermes", "<tool_call>{}</tool_call> "), ("json", "{}"), ("mistral", "[TOOL_CALLS][{}]")):
        full = around.replace("{}", said)
        assert whole(read(DIALECTS[name], [full])) == Whole(full)
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    found = whole(read(DIALECTS["hermes"], list(f"<tool_call>{said}</tool_call>{good}")))
    assert found.content == f"<tool_call>{said}</tool_call>" or "[[" in said or not said.endswith("}"), found
    assert meant(found.calls) == [("f", {"a": 1})]


LENIENT = {
    "hermes": '<tool_call>{"arguments": {"a": 1}, "name": "f"}',
    "llama3_json": '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [ {"name":"f","arguments":"{\\"a\\": 1}"} ]', "mistral_named": "[TOOL_CALLS]f{\"a\": 1}",
    "pythonic": " [ f ( a = 1 , ) ]".replace(", )", ")"), "json": '\n{"name": "f", "parameters": {"a": 1}}\n',
    "gemma": "```tool_code\nf(a=1)```", "smollm": '<tool_call>\n[{"name": "f", "arguments": {"a": 1}}]\n</tool_call>',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```',
    "qwen3_coder": "<tool_call><function=f><parameter=a>1</parameter></function>",
}  # fmt: skip


@pytest.mark.parametrize("name", LENIENT)
def test_calls_that_are_written_otherwise_are_calls_too(name: str) -> None:
    found = whole(read(DIALECTS[name], list(LENIENT[name])))
    assert (meant(found.calls), found.content) == ([("f", {"a": 1})], "")


def test_pythons_words_become_jsons() -> None:
    said = """[f(a='it\\'s "x"\\n', b_1=(1, -2.5e3), é={'k': None, "l": [True, false]}), name()]"""
    found = whole(read(DIALECTS["pythonic"], list(said)))
    expected = {"a": 'it\'s "x"\n', "b_1": [1, -2500.0], "é": {"k": None, "l": [True, False]}}
    assert meant(found.calls) == [("f", expected), ("name", {})]
    for odd in ("[f(1)]", "[f(a=b)]", "[f(a=1,)]x", "[f(a={1: 2})]", "[f(a='\\ud800')]", "[g(a=1)]", "[f(a=1"):
        assert whole(read(DIALECTS["pythonic"], [odd])).content == odd


def test_a_value_between_tags_is_what_its_schema_says() -> None:
    properties = {
        "s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": ["boolean", "string"]},
        "r": {"$ref": "#/$defs/s"}, "l": {"type": "array"}, "free": {}, "loop": {"$ref": "#/properties/loop"},
    }  # fmt: skip
    schema = {"properties": properties, "$defs": {"s": {"enum": ["1", "2"]}}}

    def meaning(key: str, text: str) -> Any:
        said = f"<tool_call><function=f><parameter={key}>\n{text}\n</parameter></function></tool_call>"
        (call,) = whole(read(DIALECTS["qwen3_coder"], [said], names={"f": schema})).calls
        return json.loads(call.arguments)[key]

    assert [meaning("s", text) for text in ("1", "", "\n a\n", "null", '"a"')] == ["1", "", "\n a\n", "null", '"a"']
    assert [meaning("n", text) for text in ("1", "2.5", "x", "NaN", "[1]")] == [1, 2.5, "x", "NaN", "[1]"]
    assert [meaning("b", text) for text in ("true", "True", "1", "yes")] == [True, True, "1", "yes"]
    assert [meaning("r", "1"), meaning("l", " [1] "), meaning("l", "{}")] == ["1", [1], "{}"]
    for odd in ({"properties": []}, {"properties": {"a": 1}}, {"properties": {"a": {"$ref": "#/a/b"}}, "a": []}):
        schema = odd
        assert meaning("a", "1") == 1
    schema = {}
    texts = ("1", "a", '"a"')
    assert [meaning(key, text) for key in ("free", "loop", "more") for text in texts] == [1, "a", '"a"'] * 3


def test_reading_is_linear() -> None:
    """Nothing that has been read is looked at again: little is left unread between two pieces, whatever came before."""
    for dialect in DIALECTS.values():
        said = written(dialect, [Call("f", json.dumps({"a": "x" * 3000, "b_1": [1] * 1000}))] * 2) + "y" * 2000
        for eager in (False, True):
            parser, longest = ToolParser(dialect, NAMES, eager=eager), max(map(len, [*dialect.marks, "function" * 5]))
            for start in range(0, len(said), 7):
                parser.push(said[start : start + 7])
                assert len(parser._feed._text) <= longest + 7


TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools }}", "smollm": "You are SmolLM", "json": "{{ messages }}",
    "llama3_json": '{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": "{{ tools }}[TOOL_CALLS]", "mistral_named": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]",
    "pythonic": "{{ tools }}[func_name1(params_name1=params_value1)]", "gemma": "{{ tools }}```tool_code",
    "qwen3_coder": "{{ tools }}<tool_call><function=f><parameter=a>",
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜>```json\\n", "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜>",
}  # fmt: skip


def test_a_template_tells_its_dialect() -> None:
    assert set(TEMPLATES) == set(DIALECTS)
    for name, template in TEMPLATES.items():
        assert dialect_of(template) is DIALECTS[name]
    assert dialect_of("{{ tools }}<tool_call><function=f>") is None and dialect_of("{{ tools }}") is None
    assert dialect_named("qwen3") is DIALECTS["hermes"]
    with pytest.raises(InvalidInput, match="hermes"):
        dialect_named("nobody's")
    with pytest.raises(InvalidInput):
        written(DIALECTS["hermes"], [Call("f", "[1]")])

"""The grammar of each dialect and its parser agree: what one writes the other reads, and nothing else passes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping

import pytest
from grammar_walk import taken
from jsonschema import validate

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.answer import AnswerForm, AnswerReader
from octavo.decoding.answer_grammar import answer_grammar
from octavo.decoding.grammar import GrammarCompiler, Matcher
from octavo.decoding.grammar.matcher import only_one
from octavo.decoding.pieces import Call, Piece, Whole, whole
from octavo.decoding.reasoning import FORMATS
from octavo.decoding.reasoning.grammar import thoughts_grammar
from octavo.decoding.tools import DIALECTS, ToolDialect, written
from octavo.decoding.tools.grammar import Tool, _schema
from octavo.tokenizers.simple import SimpleTokenizer

EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
MARKS = ("<think>", "</think>", "[TOOL_CALLS]", "<｜tool▁sep｜>")
LETTERS = {"type": "string", "pattern": "^[a-e]{0,6}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "s": LETTERS,
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {"$ref": "#/$defs/d"},
    },
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"d": {"type": ["boolean", "null"]}},
}
TOOLS = (Tool("f", SCHEMA), Tool("g.h", {"type": "object", "properties": {}, "additionalProperties": False}))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
TEXTS = {**SCHEMA["properties"], "s": {"type": "string", "enum": ["ab", "e\n", "<b>"]}}  # type: ignore[dict-item]


def tools_of(dialect: ToolDialect) -> tuple[Tool, ...]:
    """No pattern of a string can be enforced between tags."""
    return (Tool("f", {**SCHEMA, "properties": TEXTS}), TOOLS[1]) if dialect.form == "tags" else TOOLS


def tokenizer(special: tuple[str, ...]) -> SimpleTokenizer:
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["<eos>", *special]
    return SimpleTokenizer(vocab, kind="bytes", eos=["<eos>"], special=list(special))


PLAIN, MARKED = tokenizer(()), tokenizer(MARKS)


def matcher(form: AnswerForm, tokens: SimpleTokenizer, *, required: bool, budget: int | None = None) -> Matcher:
    tools = TOOLS if form.tools is None else tools_of(form.tools)
    source, _ = answer_grammar(form, tools, tokens, required=required, budget=budget)
    assert source is not None
    return GrammarCompiler(tokens, tokens.vocab_size, tokens.eos_ids).matcher(Grammar("lark", source))


def ids_of(text: str, special: Mapping[str, int]) -> list[int]:
    marks = "|".join(map(re.escape, special))
    parts = re.split(f"({marks})", text) if marks else [text]
    return [i for part in parts for i in ([special[part]] if part in special else part.encode())]


def allows(found: Matcher, ids: list[int]) -> bool:
    """Whether these ids and then the end are a word."""
    return taken(found, [*ids, 256]) == len(ids) + 1


@EVERY
@pytest.mark.parametrize("tokens", [PLAIN, MARKED], ids=["plain", "marked"])
def test_what_is_written_passes_and_what_is_not_a_call_does_not(dialect: ToolDialect, tokens: SimpleTokenizer) -> None:
    calls = [Call("f", '{"s": "ab", "n": 7, "deep": null}'), Call("g.h", "{}"), Call("f", '{"n": 0}')]
    text = written(dialect, calls).replace("None", "null")

    def passes(text: str, required: bool, most: int | None = None) -> bool:
        form = AnswerForm(tools=dialect, names=SCHEMAS, most_calls=most)
        return allows(matcher(form, tokens, required=required), ids_of(text, tokens.special_tokens))

    assert passes(text, True) and not passes(text, True, 1)
    assert passes(written(dialect, calls[1:2]), True, 1)
    for bad in (
        "",
        "Hi",
        "x" + text,
        text.replace("7", "700"),
        text.replace("g.h", "h"),
        text[:-1],
        text.replace("ab", "az"),
    ):
        assert not passes(bad, True), bad
    if dialect.bare:
        return
    assert passes(f"Hi <b>\n{text}", False) and passes("Hi <b>\n", False) and passes("", False)
    assert not passes("Hi\n" + text.replace("7", "700"), False)


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS.values() if dialect.bare])
@pytest.mark.parametrize("tokens", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("most", [None, 1])
def test_an_answer_that_begins_with_a_bracket_is_strict_calls(
    name: str, tokens: SimpleTokenizer, most: int | None
) -> None:
    dialect = DIALECTS[name]
    form = AnswerForm(tools=dialect, names=SCHEMAS, eager=True, most_calls=most)
    source, eager = answer_grammar(form, TOOLS, tokens, required=False, budget=None, strict=True)
    compiler = GrammarCompiler(tokens, tokens.vocab_size, tokens.eos_ids)
    assert source is not None and eager

    def passes(text: str) -> bool:
        found = compiler.matcher(Grammar("lark", source))
        return allows(found, ids_of(text, tokens.special_tokens))

    one, two = ([Call("f", '{"s": "ab", "n": 7}'), Call("g.h", "{}")][:count] for count in (1, 2))
    call = written(dialect, one)
    assert passes(call) and passes(written(dialect, two)) == (most is None)
    for text in ("", " ", "\n", "So: {", "1 [", f"x{call}", "\n\nYes.\n"):
        assert passes(text), text
        assert whole(read_all(form, text)) == Whole(text)
    for bad in ("{}", "[", f" {call}", call.replace("7", "700"), call[:-1], f"{call}x", "{", "\n["):
        assert not passes(bad), bad
    if dialect.opens:
        marked = f"So:\n{dialect.opens}{call}{dialect.closes}"
        assert passes(marked) and not passes(marked.replace("7", "700"))
        assert passes(marked + marked) and passes(marked + marked.replace("7", "700")) == (most == 1)
        assert whole(read_all(form, marked)).calls == whole(read_all(form, call)).calls


def read_all(form: AnswerForm, text: str) -> list[Piece]:
    reader = AnswerReader(form)
    return reader.push(text) + reader.finish()


def test_a_tool_that_may_be_called_with_anything_is() -> None:
    anything = Tool("f", {"type": "object"})
    arguments = '{"a": 1, "b_1": [true, {"c": null}]}'
    for dialect in DIALECTS.values():
        form = AnswerForm(tools=dialect, names=("f",))
        source, _ = answer_grammar(form, [anything], PLAIN, required=True, budget=None)
        assert source is not None
        for text in (arguments, "{}"):
            call = written(dialect, [Call("f", text)]).replace("True", "true").replace("None", "null")
            found = GrammarCompiler(PLAIN, PLAIN.vocab_size, PLAIN.eos_ids).matcher(Grammar("lark", source))
            assert allows(found, ids_of(call, {})), call


@EVERY
def test_what_the_grammar_lets_through_is_read_as_calls_that_fit(dialect: ToolDialect) -> None:
    draw = random.Random(3)
    schemas = {tool.name: tool.parameters for tool in tools_of(dialect)}
    form = AnswerForm(tools=dialect, names=schemas, eager=True)
    for number in range(12):
        found, ids = matcher(form, MARKED, required=True), list[int]()
        while len(ids) < 600:
            mask = found.mask()
            allowed = [i for i in range(MARKED.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
            token = (
                256
                if 256 in allowed and (number % 2 or len(ids) > 200)
                else draw.choice([i for i in allowed if i != 256] or allowed)
            )
            found.accept([token])
            if token == 256:
                break
            ids.append(token)
        text, reader = MARKED.decode(ids, skip_special_tokens=False), AnswerReader(form)
        answer = whole([piece for each in text for piece in reader.push(each)] + reader.finish())
        assert answer.calls and not answer.content, text
        for call in answer.calls:
            validate(json.loads(call.arguments), schemas[call.name])


def test_thoughts_end_when_their_budget_is_spent() -> None:
    form = AnswerForm(FORMATS["think"], True)
    found = matcher(form, MARKED, required=False, budget=5)
    assert taken(found, list(b"abcdefg")) == 5
    found.accept(list(b"abcde"))
    assert only_one(found.mask()) == MARKED.special_tokens["</think>"]
    found.rollback(2)
    assert taken(found, list(b"xyz")) == 2
    assert allows(matcher(form, MARKED, required=False, budget=0), [258, *b"Yes"])
    begun = AnswerForm(FORMATS["think"])
    assert only_one(matcher(begun, MARKED, required=False, budget=5).mask()) == 257
    with pytest.raises(InvalidInput, match="no single token"):
        matcher(form, PLAIN, required=False, budget=5)


FORMATS_OF_AN_ANSWER = [
    Grammar("json_schema", '{"type": "integer"}'), Grammar("regex", "[0-9]+"), Grammar("choice", '["12", "13"]'),
    Grammar("lark", "start: thoughts\nthoughts: /[0-9]+/"), Grammar("lark", 'root ::= "12"'),
    Grammar("structural_tag", '{"format": {"type": "regex", "pattern": "[0-9]+"}}'),
]  # fmt: skip


@pytest.mark.parametrize("word", FORMATS_OF_AN_ANSWER, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("tokens", [PLAIN, MARKED], ids=["plain", "marked"])
def test_thoughts_may_stand_before_a_word_of_any_grammar(word: Grammar, tokens: SimpleTokenizer) -> None:
    compiler = GrammarCompiler(tokens, tokens.vocab_size, tokens.eos_ids)

    def passes(text: str, is_open: bool) -> bool:
        before = thoughts_grammar(FORMATS["think"], tokens, is_open=is_open, budget=None)
        found = compiler.matcher(Grammar.of({**word.to_dict(), "before": before}))
        return allows(found, ids_of(text, tokens.special_tokens))

    assert passes("a {1}\n</think>\n\n12", True) and passes("</think>12", True)
    assert passes("<think>a</think>12", False) and passes("12", False)
    for bad in ("12", "a</think>x", "a</think>", "a</think>12</think>", ""):
        assert not passes(bad, True), bad
    assert not passes("a</think>12", False) and not passes("<think>a</think>", False)


def test_thoughts_may_stand_before_a_forced_call() -> None:
    call = written(DIALECTS["hermes"], [Call("g.h", "{}")])
    for tokens in (PLAIN, MARKED):
        for is_open, text in ((True, f"a\n</think>\n\n{call}"), (False, f"<think>a</think>{call}"), (False, call)):
            form = AnswerForm(FORMATS["think"], is_open, DIALECTS["hermes"], SCHEMAS)
            assert allows(matcher(form, tokens, required=True), ids_of(text, tokens.special_tokens)), text
            reader = AnswerReader(form)
            assert whole(reader.push(text) + reader.finish()).calls == [Call("g.h", "{}")]
            assert not allows(matcher(form, tokens, required=True), ids_of(text[:-30], tokens.special_tokens))


def test_python_calls_take_plain_objects_alone() -> None:
    for odd in ({"anyOf": []}, {"required": ["b"]}, {"properties": {"a b": {}}}):
        form = AnswerForm(tools=DIALECTS["pythonic"], names=("f",))
        with pytest.raises(InvalidInput, match="parameters"):
            answer_grammar(form, [Tool("f", {"type": "object", **odd})], PLAIN, required=True, budget=None)
    assert Whole() == whole([])


def test_arguments_that_could_never_end_are_not_offered():
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    written = _schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": endless}})
    assert json.loads(written.removeprefix("%json "))["properties"] == {"a": False}


MIXED = {"type": "string", "enum": ["a", 1]}


def test_between_tags_a_string_is_any_text_or_one_of_its_enum() -> None:
    dialect = DIALECTS["qwen3_coder"]
    properties = {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}
    form = AnswerForm(tools=dialect, names=("f",))
    source, _ = answer_grammar(form, [Tool("f", {"properties": properties})], PLAIN, required=True, budget=None)
    assert source is not None
    compiler = GrammarCompiler(PLAIN, PLAIN.vocab_size, PLAIN.eos_ids)
    for text, passes in (('{"a": "<b>\\n\\"é", "b": [1, 2]}', True), ("{}", True), ('{"b": ["x"]}', False)):
        call = written(dialect, [Call("f", text)])
        assert allows(compiler.matcher(Grammar("lark", source)), ids_of(call, {})) == passes, call
    for odd in (
        {"pattern": "a", "type": "string"},
        {},
        {"type": ["string", "null"]},
        {"enum": ["</parameter>"]},
        MIXED,
    ):
        with pytest.raises(InvalidInput, match="parameters"):
            tools = [Tool("f", {"properties": {"a": odd}})]
            answer_grammar(form, tools, PLAIN, required=True, budget=None)
    for whole_schema in ({"anyOf": []}, {"required": ["b"]}, {"properties": {"a>": {}}}):
        with pytest.raises(InvalidInput, match="parameters"):
            answer_grammar(form, [Tool("f", whole_schema)], PLAIN, required=True, budget=None)

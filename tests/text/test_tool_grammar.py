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
from octavo.decoding.pieces import Call, Whole, whole
from octavo.decoding.reasoning import FORMATS
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


def tokenizer(special: tuple[str, ...]) -> SimpleTokenizer:
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["<eos>", *special]
    return SimpleTokenizer(vocab, kind="bytes", eos=["<eos>"], special=list(special))


PLAIN, MARKED = tokenizer(()), tokenizer(MARKS)


def matcher(form: AnswerForm, tokens: SimpleTokenizer, *, required: bool, budget: int | None = None) -> Matcher:
    source, _ = answer_grammar(form, TOOLS, tokens, required=required, budget=budget)
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


@EVERY
def test_what_the_grammar_lets_through_is_read_as_calls_that_fit(dialect: ToolDialect) -> None:
    draw = random.Random(3)
    form = AnswerForm(tools=dialect, names=SCHEMAS, eager=True)
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
            validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_thoughts_end_when_their_budget_is_spent() -> None:
    form = AnswerForm(FORMATS["think"], True)
    found = matcher(form, MARKED, required=False, budget=5)
    assert taken(found, list(b"abcdefg")) == 5
    found.accept(list(b"abcde"))
    assert found.forced(9) == [MARKED.special_tokens["</think>"]]
    found.rollback(2)
    assert taken(found, list(b"xyz")) == 2
    assert allows(matcher(form, MARKED, required=False, budget=0), [258, *b"Yes"])
    begun = AnswerForm(FORMATS["think"])
    assert matcher(begun, MARKED, required=False, budget=5).forced(1) == [257]
    with pytest.raises(InvalidInput, match="no single token"):
        matcher(form, PLAIN, required=False, budget=5)


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

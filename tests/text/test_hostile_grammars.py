"""Grammars that cost: they meet the limits, say so, and take nobody else with them. No clock: limits are counts."""

import json
import random

import pytest
from grammar_walk import bits, compiler, fresh, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar import GrammarCompiler, GrammarFault, OutputMasks
from octavo.decoding.grammar import compiler as limits
from octavo.tokenizers.simple import SimpleTokenizer

LETTERS = "abcdefghij"
STRING = {"type": "string"}


def json_schema(schema):
    return Grammar("json_schema", json.dumps(schema))


def rules(count, tail, head="start: s"):
    names = [f"r{i}" for i in range(count)]
    lines = [head, "s: s s | " + " | ".join(names), *(f"r{i}: W{i} {tail}" for i in range(count))]
    return Grammar("lark", "\n".join([*lines, *(f"W{i}: /[a-z]{{1,{i + 1}}}/" for i in range(count))]))


COUNTED = [{**STRING, "pattern": f"^[a-z ]*{letter}[a-z ]{{17}}$"} for letter in LETTERS]
DEEP = [f'r{i}: r{i + 1} | "a" r{i + 1} | r{i + 1} "b"' for i in range(60)]
CHAIN = "\n".join(f"r{i}: /[a-z ]*{LETTERS[i % 10]}[a-z ]{{{i // 10}}}/" for i in range(60))
HOSTILE = [
    Grammar("regex", "(a|b)*a(a|b){17}"), Grammar("regex", "[a-z ]*a[a-z ]{17}"), Grammar("regex", "(.*a.{15}){3}"),
    Grammar("regex", "|".join(f"[a-z ]*{letter}[a-z ]{{17}}" for letter in LETTERS)),
    Grammar("regex", "((.{0,9}){0,9}){0,9}b"), Grammar("regex", r"(\p{L}|\p{N}){1,900}x\p{Greek}{1,900}"),
    json_schema({"anyOf": COUNTED}), json_schema({"properties": {each["pattern"]: each for each in COUNTED}}),
    json_schema({"allOf": [{**STRING, "pattern": f"^([a-z]{{{prime}}})*$"} for prime in (2, 3, 5, 7)]}),
    json_schema({"type": "object", "patternProperties": {f"{letter}.{{12}}$": {} for letter in LETTERS}}),
    json_schema({"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}),
    json_schema({"anyOf": [{**STRING, "maxLength": 100 + i} for i in range(200)]}),
    json_schema({"enum": [f"{i}" for i in range(2000)]}), json_schema({"items": {"anyOf": [{"$ref": "#"}, STRING]}}),
    rules(60, "s?"), rules(60, "s?", 'start: "x" s "!"'),
    Grammar("lark", "start: r0\n" + "\n".join(DEEP) + '\nr60: "x" | start'),
    Grammar("lark", 'start: s "z"\ns: s s s | "a" | ""'),
    Grammar("lark", 'start: x x x "z"\nx: ("a" | "aa" | x)* "b"?'),
    Grammar("lark", "start: (" + " ".join(f"r{i}?" for i in range(60)) + ")*\n" + CHAIN),
]  # fmt: skip


@pytest.mark.parametrize("grammar", HOSTILE, ids=range(len(HOSTILE)))
def test_it_is_followed_or_refused_or_fails_with_its_reason(grammar):
    for seed in range(2):
        try:
            walk(grammar, random.Random(seed), most=30)
        except InvalidInput as error:
            assert error.field in ("lark", "regex", "json_schema") or "json_schema" in error.field
        except GrammarFault as error:
            assert "too ambiguous" in str(error) or "grow too large" in str(error)


FEW = {"_STEP_FUEL": 400, "_STEP_ITEMS": 30, "_LEXER_STATES": 40}
MEETS = [
    ("_STEP_FUEL", HOSTILE[3], "regular expressions grow too large"),
    ("_LEXER_STATES", HOSTILE[1], "regular expressions grow too large"),
    ("_STEP_ITEMS", rules(20, "s?"), "too ambiguous"),
]


@pytest.mark.parametrize(("name", "grammar", "reason"), MEETS, ids=[name for name, *_ in MEETS])
def test_a_limit_that_is_met_says_what_it_is(name, grammar, reason, monkeypatch):
    monkeypatch.setattr(limits, name, FEW[name])
    rng = random.Random(1)
    with pytest.raises((GrammarFault, InvalidInput), match=reason):
        matcher = own_compiler().matcher(grammar)
        for _ in range(200):
            matcher.accept([rng.choice([i for i in bits(matcher.mask()) if i])])


def own_compiler():
    vocab = ["<eos>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return GrammarCompiler(SimpleTokenizer(vocab, kind="bytes", eos=["<eos>"], special=["<pad>"]), len(vocab), [0])


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2**32), min_size=2, max_size=5))
def test_what_others_made_of_an_automaton_is_no_fault(seeds):
    """Outputs of one grammar share its states, of which there may be so many: beyond them each gets its own."""
    grammar = Grammar("regex", "[ab]*a[ab]{7}c?")
    outputs = [walk(grammar, random.Random(seed), most=20, haste=0.0)[0] for seed in seeds]
    expected = [[fresh(grammar, output[:i]).mask() for i in range(len(output))] for output in outputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_LEXER_STATES", 90)
        own = own_compiler()

        def start(apart):
            return own.apart(grammar) if apart else own.matcher(grammar)

        masks = [OutputMasks(start, (0,)) for _ in seeds]
        for length in range(20):
            for each, output, right in zip(masks, outputs, expected, strict=True):
                if length < len(output):
                    assert each.behind(output, 0, length) == {0: right[length]}
        assert own.num_compiled == 1
        assert own.matcher(grammar).mask() == compiler().matcher(grammar).mask()

"""Grammars: what the masks let through is a word of the language, and the state is a fold over the output's ids."""

import json
import random
import re
from collections import Counter

import pytest
from grammar_walk import bits, compiler, fresh, taken, text_of, walk
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar import GrammarCompiler, GrammarFault, OutputMasks
from octavo.decoding.grammar.compiler import _price
from octavo.decoding.grammar.definition import definition
from octavo.decoding.grammar.rules import may_end
from octavo.decoding.grammar.schema import MAX_ENUM
from octavo.tokenizers.simple import SimpleTokenizer

PATTERNS = [
    "a*", "(ab|a)(c|bcd)?", "[0-9]{2,4}", r"\d+(\.\d+)?", "x|xx|xyz", "é{1,2}[^é]", "(a|b)*a(a|b){3}", "^start-[a-c]+$",
    r"[a-z]{1,8}@(mail|post)\.org", r"\$", r"a\\$", "日本|日", ".{3}", "(a{0,3}){0,3}b?",
]  # fmt: skip
WORDS = ["yes", "no", "nobody", "né", 'say "hi"', "back\\slash", "two\nlines", "€", "yes or no"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}
TAG = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
GRAMMARS = [
    *(Grammar("regex", pattern) for pattern in PATTERNS),
    Grammar("choice", json.dumps(WORDS)),
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("lark", 'start: item ("," item)*\nitem: "[" start "]" | /[0-9]/'),
    Grammar("lark", 'root ::= "hello " [a-z]+ "!"'),
    Grammar("structural_tag", json.dumps({"structures": [TAG], "triggers": ["<f="]})),
]  # fmt: skip
ASCII = [grammar for grammar in GRAMMARS if grammar.source.isascii()]
SIZED = [Grammar("regex", f"a{{{i}}}|{'b' * (1 << (i + 2))}") for i in range(1, 10)]
PRICES = [_price(grammar) for grammar in SIZED]
KINDS = ("bytes", "characters")


def output_masks(grammar, made=None, kind="bytes"):
    """Counts in ``made`` how often the library makes a mask."""

    def start(apart):
        matcher = compiler(kind).apart(grammar) if apart else compiler(kind).matcher(grammar)
        if made is not None:
            matcher._state = Counting(matcher._state, made)
        return matcher

    return OutputMasks(start, (0,))


class Counting:
    def __init__(self, state, made):
        self.state, self.made = state, made

    def __getattr__(self, name):
        return getattr(self.state, name)

    def compute_bitmask(self):
        self.made["mask"] += 1
        return self.state.compute_bitmask()


MARKS = st.sampled_from(["", "?", "*", "+", "{2}", "{0,2}"])


def plain(pattern):
    return re.compile(pattern, re.DOTALL if pattern == ".{3}" else 0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_end_is_allowed_exactly_where_a_pattern_matches(pattern):
    rng = random.Random(pattern)
    for _ in range(12):
        matcher = compiler().matcher(Grammar("regex", pattern))
        ids = []
        for _ in range(12):
            allowed = bits(matcher.mask())
            raw = b"".join(compiler().tokenizer.token_bytes(i) for i in ids)
            try:
                matches = re.fullmatch(pattern, raw.decode()) is not None
            except UnicodeDecodeError:
                matches = False
            assert (0 in allowed) == matches == matcher.may_end
            if allowed == [0]:
                break
            ids.append(rng.choice([i for i in allowed if i]))
            matcher.accept(ids[-1:])


NAMES = ("start", "a", "b")
ITEMS = st.recursive(
    st.sampled_from([*NAMES, "X"]),
    lambda inner: st.tuples(st.lists(st.lists(inner, min_size=1, max_size=2), min_size=1, max_size=2), MARKS),
    max_leaves=3,
)


def as_lark(item):
    if isinstance(item, str):
        return '"x"' if item == "X" else item
    groups, mark = item
    return "(" + " | ".join(" ".join(map(as_lark, group)) for group in groups) + ")" + mark


def finite(item, rules, levels):
    """Whether something comes of an item within so many levels of rules."""
    if item == "X":
        return True
    if isinstance(item, str):
        return levels > 0 and finite(rules[item], rules, levels - 1)
    groups, mark = item
    return mark in ("?", "*", "{0,2}") or any(all(finite(one, rules, levels) for one in group) for group in groups)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, ITEMS)), st.sampled_from(["\n", " // a note: b\n", "\n\n"]))
def test_a_grammar_may_end_exactly_where_its_first_rule_derives_a_text(rules, between):
    text = between.join(f"{name}: {as_lark(item)}" for name, item in rules.items())
    assert may_end(text) == finite("start", rules, len(NAMES))
    assert may_end(text.replace(" | ", "\n  | ")) == may_end(text)


LARK = [
    ('start: A\nA: "x" A', True), ('?start: <tool> start', False), ("start: /a{2}/ start", False), ("start: b", True),
    ('start[lazy]: start "x"', False), ("start: a~3\na: a", False), ('start: "a".."z" start -> named', False),
    ('start: %json {"type": "object",\n "x": 1.5e3}', True), ('start: %json {"a": {}} start', False),
    ("start: [start]", True), ('%llguidance {}\nstart: a{,2}\na: "x" a', True), ("no grammar", True), ("x: x", True),
    ("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + "\nr3000: \"x\"", True),
    ("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + "\nr3000: r0", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ends"), LARK, ids=range(len(LARK)))
def test_what_lark_can_write_is_read(text, ends):
    assert may_end(text) == ends


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_and_no_other_word_comes_out(kind):
    words = [word for word in WORDS if kind == "bytes" or (word.isascii() and "\n" not in word)]
    rng = random.Random(1)
    ends = [walk(Grammar("choice", json.dumps(words)), rng, kind=kind) for _ in range(150)]
    assert all(ended for _, ended in ends)
    assert {text_of(ids, kind) for ids, _ in ends} == set(words)


@given(st.data(), st.sampled_from(GRAMMARS), st.integers(0, 2**32))
def test_the_state_is_a_fold_over_the_ids(data, grammar, seed):
    """However an output was accepted, taken back and accepted again, the same tokens may follow."""
    ids, _ = walk(grammar, random.Random(seed), most=24)
    masks = []
    matcher = compiler().matcher(grammar)
    for token in [*ids, None]:
        masks.append(matcher.mask())
        if token is not None:
            matcher.accept([token])
    for _ in range(4):
        back = data.draw(st.integers(0, matcher.length))
        matcher.rollback(back)
        assert matcher.mask() == masks[matcher.length] == fresh(grammar, ids[: matcher.length]).mask()
        ahead = data.draw(st.integers(0, len(ids) - matcher.length))
        matcher.accept(ids[matcher.length : matcher.length + ahead])
        assert matcher.mask() == masks[matcher.length]


@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.integers(0, 9), st.lists(st.integers(0, 259), max_size=3))
def test_masks_behind_drafts_are_those_of_the_output_with_them(grammar, seed, known, drafts):
    ids, other = (walk(grammar, random.Random(seed + i), most=10)[0] for i in range(2))
    known = min(known, len(ids))
    drafts = [*ids[known:], *drafts]
    tokens = [7, 7, *ids[:known]]
    masks = output_masks(grammar)
    for _ in range(2):
        found = list(masks.behind(tokens, 2, known, drafts, range(-1, len(drafts))).values())
        count = len(found) - 1
        assert len(ids) - known <= count <= len(drafts)
        assert found == [fresh(grammar, [*ids[:known], *drafts[:i]]).mask() for i in range(count + 1)]
        assert count == len(drafts) or drafts[count] == 0 or drafts[count] not in bits(found[-1])
    tokens += drafts[:count]
    assert masks.behind(tokens, 2, known + count) == {0: found[-1]}
    tokens[2:] = other
    masks.agree(0)
    assert masks.behind(tokens, 2, len(other)) == {0: fresh(grammar, other).mask()}


@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.integers(0, 5), st.integers(1, 12))
def test_masks_in_a_tree_of_drafts_are_those_along_each_path(grammar, seed, known, count):
    rng = random.Random(seed)
    texts = [walk(grammar, rng, most=10)[0] for _ in range(3)]
    output = texts[0][:known]
    paths: list[tuple[int, ...]] = [()]
    for _ in range(count):
        path, text = rng.choice(paths), rng.choice(texts)[known:]
        token = text[len(path)] if rng.random() < 0.8 and len(path) < len(text) else rng.randrange(260)
        paths += [] if (*path, token) in paths else [(*path, token)]
    parents = [-1, *(paths.index(path[:-1]) for path in paths[1:])]
    masks = output_masks(grammar)
    found = masks.behind([7, *output], 1, len(output), [path[-1] for path in paths[1:]], parents)
    assert all(found[row] == fresh(grammar, [*output, *paths[row]]).mask() for row in found)
    for row, path in enumerate(paths[1:], 1):
        parent = parents[row]
        assert (row in found) == (parent in found and path[-1] != 0 and path[-1] in bits(found[parent]))
    assert masks.behind([7, *output], 1, len(output)) == {0: found[0]}


@given(st.data(), st.sampled_from(GRAMMARS), st.integers(0, 2**32))
def test_each_mask_is_made_once_whoever_asks(data, grammar, seed):
    """Along an output with what is forced, guessed, drawn and taken back: no more masks than places."""
    rng, made = random.Random(seed), Counter()
    texts = [walk(grammar, rng, most=12)[0] for _ in range(2)]
    masks, output = output_masks(grammar, made), []
    while len(output) < len(texts[0]):
        places = {()}
        forced = masks.forced(output, 0, len(output), data.draw(st.integers(0, 4)))
        guesses = [forced, texts[0][len(output) :][:3], texts[1][len(output) :][:2]]
        places |= {tuple(guess[:i]) for guess in guesses for i in range(len(guess) + 1)}
        made.clear()
        for guess in data.draw(st.permutations(guesses)) * 2:
            found = masks.behind(output, 0, len(output), guess, range(-1, len(guess)))
            assert found == {i: fresh(grammar, [*output, *guess[:i]]).mask() for i in found}
        assert made["mask"] <= len(places) - len(forced) and masks.knows(len(output))
        again = dict(made)
        masks.behind(output, 0, len(output), forced, range(-1, len(forced)))
        assert made == again
        count = data.draw(st.integers(1, 4))
        output += texts[0][len(output) :][:count]
        if data.draw(st.booleans()):
            del output[data.draw(st.integers(0, len(output))) :]
            masks.agree(len(output))
            texts[0][len(output) :] = []


@pytest.mark.parametrize("kind", KINDS)
@given(
    grammar=st.sampled_from([g for g in GRAMMARS if g.source.isascii()]),
    seed=st.integers(0, 2**32),
    most=st.integers(0, 9),
)
def test_forced_tokens_are_those_that_the_mask_leaves_alone(kind, grammar, seed, most):
    ids = walk(grammar, random.Random(seed), most=10, kind=kind)[0]
    matcher = fresh(grammar, ids, kind)
    found = output_masks(grammar, kind=kind).forced(ids, 0, len(ids), most)
    for token in found:
        assert bits(matcher.mask()) == [token]
        matcher.accept([token])
    assert len(found) == most or found[-1:] == [0] or len(bits(matcher.mask())) > 1


@given(st.sampled_from(GRAMMARS), st.integers(0, 2**32), st.integers(1, 30))
def test_an_end_is_taken_back_as_any_other_token(grammar, seed, back):
    ids, ended = walk(grammar, random.Random(seed), most=24)
    if not ended:
        return
    matcher = fresh(grammar, [*ids, 0])
    assert matcher.length == len(ids) + 1
    with pytest.raises(GrammarFault, match="ended"):
        matcher.mask()
    matcher.rollback(min(back, matcher.length))
    assert matcher.mask() == fresh(grammar, ids[: matcher.length]).mask()


def test_spare_and_special_ids_are_never_allowed():
    allowed = set()
    for seed in range(30):
        matcher = compiler().matcher(Grammar("regex", "(.|\n)*"))
        matcher.accept(walk(Grammar("regex", "(.|\n)*"), random.Random(seed), most=3)[0])
        allowed |= set(bits(matcher.mask()))
    assert 1 not in allowed and max(allowed) <= 257


def test_what_no_token_can_say_ends_with_a_fault():
    """The library would let the output end there, although it is no word."""
    tokenizer = SimpleTokenizer(["<eos>", "a", "b"], eos=["<eos>"])
    few = GrammarCompiler(tokenizer, 3, [0])
    matcher = few.matcher(Grammar("regex", "a+(z|bz)"))
    matcher.accept([1, 1])
    with pytest.raises(GrammarFault, match="no token"):
        matcher.accept([2])
        matcher.mask()
    for grammar in (Grammar("json_object"), Grammar("regex", "z")):
        with pytest.raises(InvalidInput, match="nothing can be said"):
            few.matcher(grammar)


def test_a_token_that_is_forbidden_is_a_fault():
    with pytest.raises(GrammarFault, match="does not fit"):
        fresh(Grammar("regex", "ab"), [3, 3])


def test_a_model_without_an_end_token_has_no_grammars():
    with pytest.raises(InvalidInput, match="no end token"):
        GrammarCompiler(SimpleTokenizer(["a", "b"]), 2, []).matcher(Grammar("regex", "a"))


@given(st.integers(0, 10**6))
def test_any_object_is_an_object(seed):
    ids, ended = walk(Grammar("json_object"), random.Random(seed), most=200, haste=0.5)
    assert not ended or isinstance(json.loads(text_of(ids)), dict)


ASKS = st.tuples(st.sampled_from(["ask", "ask", "hold", "release"]), st.integers(1, 9))


@given(st.lists(ASKS, min_size=1, max_size=16), st.integers(1, 5), st.integers(0, 3 * PRICES[0]))
def test_compiled_grammars_are_kept_up_to_a_number_and_a_sum(asked, most, room):
    """The last ones asked for, as many as both bounds allow; in any case the very last one and those that are held."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.decoding.grammar.compiler.MAX_KEPT", most)
        patch.setattr("octavo.decoding.grammar.compiler.MAX_BYTES", room)
        small = GrammarCompiler(SimpleTokenizer(["<eos>", "a"], eos=["<eos>"]), 2, [0])
        kept, compilations, held = [], 0, Counter()
        for what, i in asked:
            if what == "release" and held[i]:
                small.release(SIZED[i - 1])
                held -= Counter([i])
            if what == "hold":
                price = sum(PRICES[j - 1] for j in {*held, i})
                expected = not held or i in held or (len(held) < most and price <= room)
                assert small.may_hold(SIZED[i - 1]) == small.hold(SIZED[i - 1]) == expected
                held += Counter([i] * expected)
            if what == "release" or (what == "hold" and not expected):
                continue
            small.matcher(SIZED[i - 1])
            if i not in kept:
                compilations += 1
                kept = trimmed([i, *kept], held, most, room)
            kept.sort(key=lambda j: j != i)
            assert [i for i in range(1, 10) if small.knows(SIZED[i - 1])] == sorted(kept)
            assert small.num_compiled == compilations and small.num_held == len(held)


def trimmed(kept, held, most, room):
    """Without the last ones of those that need not be kept, until both bounds hold."""
    for i in reversed(kept[1:]):
        if (len(kept) > most or sum(PRICES[j - 1] for j in kept) > room) and not held[i]:
            kept = [j for j in kept if j != i]
    return kept


def test_as_many_choices_as_are_allowed_can_be_followed():
    words = [f"c{number}" for number in range(MAX_ENUM)]
    for grammar in (Grammar("choice", json.dumps(words)), Grammar("json_schema", json.dumps({"enum": words}))):
        for word in (words[0], words[1047], words[-1]):
            said = word if grammar.kind == "choice" else f'"{word}"'
            ids = [2 + byte for byte in said.encode()]
            assert taken(compiler().matcher(grammar), [*ids, 0]) == len(ids) + 1, (grammar.kind, word)


@pytest.mark.parametrize("name", ["temperature=0.5", "capture", 'capture="a"'])
def test_attributes_of_rules_that_change_nothing_are_refused(name):
    for attributes in (name, f"max_tokens=3, {name}"):
        with pytest.raises(InvalidInput, match=name.split("=")[0]):
            definition(Grammar("lark", f"start: x\nx[{attributes}]: /a*/"))
    assert definition(Grammar("lark", "start: x\nx[max_tokens=3]: /[temperature=]*/"))

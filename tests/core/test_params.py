"""Sampling parameters: every bound refuses its neighbour outside, names the field, and survives JSON."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.core.grammar import KINDS, MAX_REGEX_BYTES, MAX_SOURCE_BYTES, Grammar
from octavo.core.params import POOLINGS, SamplingParams

NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "typical_p": (1e-9, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
}
INTEGERS = {
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 16),
    "n": (1, 64),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "dry_allowed_length": (1, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "no_repeat_ngram_size": (0, 2**31 - 1),
    "mirostat": (0, 2),
    "repeat_last_n": (-1, 2**31 - 1),
}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def refused(field, **values):
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**values)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_both_bounds(name):
    low, high = NUMBERS[name]
    for good in (low, high):
        assert getattr(SamplingParams(**{name: good}), name) == good
    beyond = (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    for bad in (*beyond, math.nan, math.inf, -math.inf, "1", True, None, [1], 10**400):
        refused(name, **{name: bad})


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_both_bounds(name):
    low, high = INTEGERS[name]
    for good in (low, high):
        assert getattr(SamplingParams(**{name: good}), name) == good
    for bad in (low - 1, high + 1, 1.0, "1", True, [1]):
        refused(name, **{name: bad})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    assert getattr(SamplingParams(**{name: True}), name) is True
    for bad in (1, "true", None):
        refused(name, **{name: bad})


@pytest.mark.parametrize(
    ("name", "most"), [("stop_token_ids", 1024), ("banned_token_ids", 1024), ("logprob_token_ids", 128)]
)
def test_id_lists(name, most):
    assert getattr(SamplingParams(**{name: list(range(most))}), name) == tuple(range(most))
    refused(name, **{name: range(most + 1)})
    refused(name, **{name: 3})
    refused(name, **{name: "12"})
    refused(f"{name}[1]", **{name: [0, -1]})
    refused(f"{name}[0]", **{name: [True]})


@pytest.mark.parametrize(
    ("name", "most"), [("bad_words", 128), ("dry_sequence_breakers", 16), ("logits_processors", 16)]
)
def test_words(name, most):
    assert getattr(SamplingParams(**{name: ["x" * 256] * most}), name) == ("x" * 256,) * most
    refused(name, **{name: ["x"] * (most + 1)})
    for bad in (3, "word", {"a": 1}, None):
        refused(name, **{name: bad})
    for bad in ("", "x" * 257, 3):
        refused(f"{name}[1]", **{name: ["x", bad]})


def test_words_are_looked_up_before_an_engine_has_them():
    for params in (SamplingParams(bad_words=["x"]), SamplingParams(dry_multiplier=1.0)):
        with pytest.raises(InvalidInput, match=r"with_token_ids"):
            params.looked_up()
    for params in (SamplingParams(), SamplingParams(dry_multiplier=1.0, dry_breaker_ids=())):
        assert params.looked_up() is params


def test_banned_sequences():
    assert SamplingParams(banned_sequences=[[1, 2], (3,)]).banned_sequences == ((1, 2), (3,))
    refused("banned_sequences", banned_sequences=[[1]] * 257)
    refused("banned_sequences", banned_sequences=3)
    refused("banned_sequences[1]", banned_sequences=[[1], []])
    refused("banned_sequences[0][0]", banned_sequences=[[-1]])


def test_repetition_detection():
    found = SamplingParams(repetition_detection={"max_pattern_size": 8, "min_count": 4}).repetition_detection
    assert found == (8, 1, 4) and SamplingParams(repetition_detection=[8, 1, 4]).repetition_detection == found
    for bad in ({}, 3, "x", {"min_count": 4}, {"max_pattern_size": 2, "size": 3}, [1, 1, 2, 2]):
        refused("repetition_detection", repetition_detection=bad)
    for name, bad in (("max_pattern_size", 0), ("max_pattern_size", 257), ("min_pattern_size", 9), ("min_count", 1)):
        refused(f"repetition_detection.{name}", repetition_detection={"max_pattern_size": 8, name: bad})


def test_stop_strings():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=["x" * 256] * 16).stop == ("x" * 256,) * 16
    refused("stop", stop=["x"] * 17)
    refused("stop", stop=3)
    for bad in ("", "x" * 257, 3):
        refused("stop[1]", stop=["x", bad])


def test_logit_bias():
    params = SamplingParams(logit_bias={"9": 100, 3: -100.0})
    assert list(params.logit_bias.items()) == [(3, -100.0), (9, 100.0)]
    refused("logit_bias", logit_bias=dict.fromkeys(range(1025), 0))
    refused("logit_bias", logit_bias=[(1, 2)])
    for bad in (-1, "-1", "x", 1.5, "9" * 5000, "²"):
        refused("logit_bias key", logit_bias={bad: 0})
    for bad in (100.1, math.nan, "1", True):
        refused("logit_bias[3]", logit_bias={3: bad})


def test_fields_that_must_agree():
    refused("min_tokens", min_tokens=3, max_tokens=2)
    assert SamplingParams(min_tokens=3, max_tokens=None).min_tokens == 3
    refused("allowed_token_ids", allowed_token_ids=())
    refused("allowed_token_ids", allowed_token_ids=[1, 2], banned_token_ids=[2, 1])
    assert SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[1]).allowed_token_ids == (1, 2)


def test_grammars():
    for kind in KINDS:
        source = "" if kind == "json_object" else "x"
        assert SamplingParams(grammar=Grammar(kind, source)).grammar == Grammar(kind, source)
        refused("grammar.source", grammar={"kind": kind, "source": "x" if not source else ""})
        refused("ignore_eos", grammar=Grammar(kind, source), ignore_eos=True)
        refused("grammar", grammar=Grammar(kind, source), pooling="mean", max_tokens=0)
        most = MAX_REGEX_BYTES if kind == "regex" else MAX_SOURCE_BYTES
        if source:
            assert Grammar(kind, "é" * (most // 2)).source
            refused("grammar.source", grammar={"kind": kind, "source": "é" * (most // 2) + "x"})
    refused("grammar.kind", grammar={"kind": "yaml", "source": "x"})
    for bad in (3, None, b"x", "\ud800"):
        refused("grammar.source", grammar={"kind": "lark", "source": bad})
    for bad in ("lark", 3, {}, {"source": "x"}, {"kind": "lark", "source": "x", "strict": True}, ["lark", "x"]):
        refused("grammar", grammar=bad)


def test_greedy_is_a_vanishing_temperature():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_unknown_fields_get_a_hint():
    for name, remedy in (("temprature", "did you mean temperature?"), ("zzzz", "known fields: max_tokens")):
        with pytest.raises(InvalidInput, match=f"{name} = 1: {remedy}".replace("?", r"\?")):
            SamplingParams.from_dict({name: 1})


ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
strategies = {
    **{name: st.floats(low, high) for name, (low, high) in NUMBERS.items()},
    **{name: st.integers(low, high) for name, (low, high) in INTEGERS.items()},
    **{name: st.booleans() for name in FLAGS},
    "max_tokens": st.one_of(st.none(), st.integers(16, 2**31 - 1)),
    "seed": st.one_of(st.none(), st.integers(*INTEGERS["seed"])),
    "logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "prompt_logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.one_of(st.none(), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
    "banned_token_ids": st.lists(st.integers(100, 199), max_size=4),
    "stop_token_ids": ids,
    "logprob_token_ids": ids,
    "grammar": st.one_of(
        st.none(), st.just(Grammar("json_object")), st.builds(Grammar, st.just("lark"), st.text(min_size=1, max_size=9))
    ),
    "dry_breaker_ids": st.one_of(st.none(), ids),
    "dry_sequence_breakers": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "logits_processors": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "banned_sequences": st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), max_size=3),
    "repetition_detection": st.one_of(st.none(), st.tuples(st.integers(3, 256), st.integers(1, 3), st.integers(2, 99))),
    "pooling": st.sampled_from([None, *POOLINGS]),
    "best_of": st.sampled_from([None, 64]),
    "use_beam_search": st.booleans(),
    "length_penalty": st.floats(-10.0, 10.0),
    "early_stopping": st.sampled_from([False, True, "never"]),
    "speculative_verifier": st.sampled_from([None, "exact", "residual"]),
}
OF_BEAMS = {
    *(
        "max_tokens",
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "seed",
        "stop",
    ),
    *("stop_token_ids", *FLAGS, "logprobs", "logprob_token_ids"),
}


@given(st.fixed_dictionaries(strategies))
def test_trip_through_json(values):
    if values["use_beam_search"]:
        values = {name: value for name, value in values.items() if name in OF_BEAMS}
        values |= {"max_tokens": values["max_tokens"] or None, "stop_token_ids": values["stop_token_ids"][:8]}
    else:
        del values["length_penalty"], values["early_stopping"]
        if values["pooling"]:
            values |= {"max_tokens": 0, "min_tokens": 0, "n": 1, "best_of": None, "prompt_logprobs": None}
            values |= {"grammar": None, "speculative_verifier": None}
        if values["grammar"]:
            values["ignore_eos"] = False
    params = SamplingParams(**values)
    again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict(), allow_nan=False)))
    assert again == params and hash(again) == hash(params)
    assert again.to_dict() == params.to_dict()


@given(st.data())
def test_nothing_is_asked_of_beams_that_they_do_not_have(data):
    name = data.draw(st.sampled_from(sorted(set(strategies) - OF_BEAMS)))
    value = data.draw(strategies[name])
    values = {name: value, "max_tokens": 0} if name == "pooling" else {name: value}
    try:
        unusual = getattr(SamplingParams(**values), name) != getattr(SamplingParams(), name)
    except InvalidInput:
        return
    if unusual and values != {"temperature": 0.0}:
        refused(name, use_beam_search=True, **values)


def test_verifiers_have_names():
    for wrong in ("typical", "", 1, True):
        refused("speculative_verifier", speculative_verifier=wrong)
    refused("speculative_verifier", pooling="mean", max_tokens=0, speculative_verifier="exact")


def test_beams_are_made_of_tokens_and_have_few_ends():
    refused("max_tokens", use_beam_search=True, max_tokens=0)
    refused("stop_token_ids", use_beam_search=True, stop_token_ids=range(9))
    SamplingParams(use_beam_search=True, max_tokens=1, stop_token_ids=range(8))


def test_all_fields_are_drawn_and_matter():
    assert set(strategies) == {item.name for item in fields(SamplingParams)}
    assert replace(SamplingParams(), logit_bias={1: 1.0}) != SamplingParams()
    assert hash(replace(SamplingParams(), logit_bias={1: 1.0})) != hash(SamplingParams())

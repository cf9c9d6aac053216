"""Requests with anything that decoding has: what may be asked for, and how asks are drawn from it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from test_same_bytes import PROMPTS

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams

_SCHEMA = json.dumps({"enum": [True, None, 12, 3.5]})
_LARK = 'start: "de" /[a-c]{1,3}/ (":" /[0-9]+/)*'

# what may be asked for, and how: an ask has some of these, one way each
FEATURES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "use_beam_search": (
        {"use_beam_search": True, "best_of": 3},
        {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": True},
        {"use_beam_search": True, "best_of": 4, "early_stopping": "never", "length_penalty": 2.0},
    ),
    "temperature": ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.4}),
    "cuts": ({"top_k": 9}, {"top_p": 0.85}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "samplers": (
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0, "typical_p": 0.9},
        {"xtc_probability": 0.7, "xtc_threshold": 0.05},
        {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
        {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.6},
        {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
    ),
    "history": (
        {"dry_multiplier": 0.9, "dry_breaker_ids": (30,), "dry_allowed_length": 1},
        {"no_repeat_ngram_size": 2},
        {"banned_sequences": ((4, 5), (19,), (2, 2))},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    ),
    "penalties": (
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.4, "presence_penalty": -0.2},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "repeat_last_n": 3},
        {"repetition_penalty": 0.8, "presence_penalty": 0.9, "repeat_last_n": 7},
    ),
    "logit_bias": ({"logit_bias": {2: 4.0, 20: 2.0}},),
    "min_tokens": ({"min_tokens": 3}, {"min_tokens": 7}),
    "stop_token_ids": ({"stop_token_ids": (16, 19, 40)},),
    "bans": ({"banned_token_ids": (4, 30, 46)}, {"allowed_token_ids": tuple(range(2, 44))}),
    "stop": ({"stop": ("a", "o")}, {"stop": ("e", "s"), "include_stop_str_in_output": True}),
    "ignore_eos": ({"ignore_eos": True},),
    "n": ({"n": 2}, {"n": 3}),
    "best_of": ({"best_of": 3}, {"n": 2, "best_of": 4}),
    "grammar": (
        {"grammar": Grammar("regex", "(the cat|a dog) sat on (a|the) mat[!?]")},
        {"grammar": Grammar("regex", "[a-e]{2}(no|yes|[0-9]{1,4})?")},
        {"grammar": Grammar("regex", "(ab|ba|x[0-9]y|zw )+")},  # what follows a wrong draft differs from what should
        {"grammar": Grammar("lark", 'start: (A | B | C)+\nA: "ab"\nB: "ba"\nC: "x" /[0-9]/ "y"')},
        {"grammar": Grammar("choice", json.dumps(["yes", "never", "abcdef", "abcd"]))},
        {"grammar": Grammar("json_schema", _SCHEMA)},
        {"grammar": Grammar("lark", _LARK)},
    ),
    "speculative_verifier": ({"speculative_verifier": "residual"},),
    "logprobs": ({"logprobs": 0}, {"logprobs": 3}, {"logprob_token_ids": (7, 9)}),
    "prompt_logprobs": ({"prompt_logprobs": 0}, {"prompt_logprobs": 2}),
    "pooling": ({"pooling": "last"}, {"pooling": "mean"}),
}
CHANCES = {
    "use_beam_search": 0.15,
    "best_of": 0.12,
    "pooling": 0.04,
    "prompt_logprobs": 0.15,
    "stop": 0.2,
    "ignore_eos": 0.25,
    "grammar": 0.4,
    "speculative_verifier": 0.0,  # played by itself: `by_residual`
}  # of the others: 0.3
LENGTHS = (1, 4, 8, 14, 20)


@dataclass(frozen=True)
class Ask:
    """One request, in all that its bytes may depend on."""

    prompt: int
    params: SamplingParams
    adapter: int  # 0: none


def goes_with(values: Mapping[str, Any]) -> InvalidInput | None:
    """Why what is asked for together is refused, if it is."""
    try:
        SamplingParams(**values)
    except InvalidInput as error:
        return error
    return None


def draw_ask(rng: random.Random) -> Ask:
    """Features that go with those before them; which pairs do not is told in docs/decoding.md and held there."""
    values: dict[str, Any] = {"max_tokens": rng.choice(LENGTHS), "seed": rng.randrange(50)}
    for name, ways in FEATURES.items():
        if not CHANCES.get(name, 0.3):
            continue
        more = rng.choice(ways)
        if rng.random() < CHANCES.get(name, 0.3) and goes_with(asked(values, more)) is None:
            values = asked(values, more)
    return Ask(rng.randrange(len(PROMPTS)), SamplingParams(**values), rng.choice((0, 0, 1, 2, 3)))


def by_residual(ask: Ask) -> Ask:
    """The same by the residual verifier, where it goes with the rest."""
    values = {**ask.params.to_dict(), "speculative_verifier": "residual"}
    return ask if goes_with(values) else replace(ask, params=SamplingParams.from_dict(values))


def asked(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with as many tokens as they need: none where none is drawn."""
    both = {**values, **more}
    tokens = 0 if "pooling" in both else max(both.get("max_tokens", 9), both.get("min_tokens", 0))
    return {**both, "max_tokens": tokens}

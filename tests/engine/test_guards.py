"""What the engine leans on: raw logprobs, the audit of every step, seeds that were drawn."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from engine_harness import MAX_SEQ_LEN, Collector, alone, make_core, make_request, run_to_end, tiny_parts

from octavo.core.errors import InvariantBroken
from octavo.core.pages import Owner, OwnerKind
from octavo.core.params import SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.parts import build_core

PROMPT = (3, 9, 4, 9, 5)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {7: 5.0, 9: -5.0}},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"allowed_token_ids": (2, 9, 11)},
        {"banned_token_ids": (2, 9, 11)},
        {"temperature": 0.7, "top_k": 3, "seed": 5},
    ],
)
def test_logprobs_are_of_the_raw_logits_whatever_chooses_the_token(model: str, changes: dict[str, Any]) -> None:
    """The first token's distribution depends on the prompt alone, and says the same of the token that was chosen."""
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "logprobs": 20, "ignore_eos": True}
    vocabulary = tiny_parts(model).config.vocab_size
    (plain,) = alone(model, PROMPT, SamplingParams(**base, logprob_token_ids=tuple(range(vocabulary))))
    (asked,) = alone(model, PROMPT, SamplingParams(**(base | changes)))
    raw = dict(plain.logprobs[0].chosen)
    assert asked.logprobs[0].top == plain.logprobs[0].top
    assert asked.logprobs[0].logprob == raw[asked.tokens[0]]
    assert asked.logprobs[0].rank == 1 + sum(value > raw[asked.tokens[0]] for value in raw.values())


def test_a_damaged_page_is_noticed_in_the_very_next_step() -> None:
    core = make_core()
    core.submit(make_request("a", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)), 0.0)
    core.step(0.0)
    page = core.kv.page_table(("a", 0))[0][0]
    core.kv.allocator.add_owner(page, Owner(OwnerKind.BRANCH, ("nobody", 0)))
    with pytest.raises(InvariantBroken):
        core.step(0.0)


def test_a_drawn_seed_moves_with_its_request() -> None:
    """Neither engine would draw the same seed again."""
    draws = itertools.count(1000)

    def engine() -> Any:
        return build_core(
            tiny_parts("llama"),
            num_pages=64,
            page_size=4,
            scheduling=SchedulerConfig(max_seq_len=MAX_SEQ_LEN),
            seed_source=lambda: next(draws),
            clock=lambda: 0.0,
            audit=True,
        )

    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=2)
    first, whole = engine(), Collector()
    request = make_request("r", PROMPT, params)
    first.submit(request, 0.0)
    for _ in range(4):
        whole.take(first.step(0.0))
    saved = json.loads(json.dumps(first.snapshot("r")))
    run_to_end(first, whole)
    second = engine()
    moved = second.restore(saved, 0.0)
    while second.has_work:
        second.step(0.0)
    assert moved.seed == request.seed == 1000
    assert moved.branches[0].output_token_ids == whole.choices["r", 0].tokens

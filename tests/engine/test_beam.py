"""Beam search: the driver against a plain definition, and the same bytes whatever runs beside it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_harness import Collector, assert_idle, make_core, make_request, run_to_end
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.batch import GangEnding, TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.decoding.beam import next_move, score

VOCAB, NONE = 12, -1e9
PROMPT = (1, 5, 9)


# ---- the definition: the loop of transformers 5, one sequence, in plain lists


def likely(seed: int, tokens: Sequence[int]) -> list[float]:
    """The logprobs of a model that nobody would want: of every token, after ``tokens``."""
    rng = random.Random(f"{seed} {list(tokens)}")
    logits = [rng.gauss(0.0, 2.0) for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def definition(seed: int, ends: set[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    """All beams that have ended, best first, and their scores."""
    width, most, penalty = params.num_branches, params.max_tokens or 0, params.length_penalty
    running = [([], 0.0)] + [([], NONE)] * (width - 1)
    finished: list[tuple[list[int], float, bool]] = [([], NONE, False)] * width
    keep = max(2, 1 + len(ends)) * width
    for length in range(1, most + 1):
        found = [
            ([*said, token], before + (NONE if token in ends and length <= params.min_tokens else value))
            for said, before in running
            for token, value in enumerate(likely(seed, [*PROMPT, *said]))
        ]
        found = sorted(found, key=lambda pair: -pair[1])[:keep]
        hits = [said[-1] in ends or length == most for said, _ in found]
        order = sorted(range(keep), key=lambda i: -(found[i][1] + hits[i] * NONE))[:width]
        running = [(found[i][0], found[i][1] + hits[i] * NONE) for i in order]
        now = [
            (said, total / length**penalty + (not (hit and place < width)) * NONE, hit and place < width)
            for place, ((said, total), hit) in enumerate(zip(found, hits, strict=True))
        ]
        finished = sorted([*finished, *now], key=lambda one: -one[1])[:width]
        at = most if params.early_stopping == "never" and penalty > 0.0 else length
        worst = min(one[1] for one in finished) if all(one[2] for one in finished) else NONE
        full = all(one[2] for one in finished)
        if not running[0][1] / at**penalty > worst or (full and params.early_stopping is True) or all(hits):
            break
    return [(said, total) for said, total, _ in finished]


def driven(seed: int, ends: set[int], params: SamplingParams) -> tuple[GangEnding, ...]:
    """The same by the driver, with nothing but branches and what the request keeps; through JSON at every step."""
    request = Request("r", PROMPT, params, eos_token_ids=sorted(ends))
    request.token_limit = len(PROMPT) + (params.max_tokens or 0)
    while True:
        first = request.branches[0]
        drawing = request.branches if first.num_output_tokens else [first]
        move = next_move(request, {b.choice: _drawn(seed, b.token_ids, params) for b in drawing})
        if move.endings:
            return move.endings
        before = [(b.token_ids, b.logprobs) for b in request.branches]
        for branch, parent, token, entry in zip(
            request.branches, move.parents, move.token_ids, move.logprobs, strict=True
        ):
            branch.token_ids, branch.logprobs = [*before[parent][0], token], [*before[parent][1], entry]
        request.ended = move.ended
        limit, request = request.token_limit, Request.restore(json.loads(json.dumps(request.snapshot())))
        request.token_limit = limit


def _drawn(seed: int, tokens: Sequence[int], params: SamplingParams) -> TokenLogprobs:
    values = likely(seed, tokens)
    order = sorted(range(VOCAB), key=lambda token: (-values[token], token))
    top = tuple((token, values[token]) for token in order[: params.num_top_logprobs])
    return TokenLogprobs(order[0], values[order[0]], 1, top)


BEAMS = st.builds(
    lambda width, most, least, penalty, early: SamplingParams(
        n=width,
        use_beam_search=True,
        max_tokens=most,
        min_tokens=min(least, most),
        length_penalty=penalty,
        early_stopping=early,
        logprobs=1,
    ),
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from((0, 0, 1, 3)),
    st.sampled_from((1.0, 1.0, 0.0, 0.5, 2.0, -1.0)),
    st.sampled_from((False, True, "never")),
)


def never(width: int, penalty: float = 2.0) -> SamplingParams:
    """To be ended when surely nothing better comes than the worst: here that is later than by the guess."""
    return SamplingParams(
        n=width, use_beam_search=True, max_tokens=7, length_penalty=penalty, early_stopping="never", logprobs=1
    )


@settings(max_examples=150)
@example(never(1), 44, {9})
@example(never(3), 72, {5, 6, 7})
@example(never(2, 1.0), 0, {1, 7})
@given(BEAMS, st.integers(0, 10**6), st.sets(st.integers(0, VOCAB - 1), max_size=3))
def test_the_driver_does_as_the_definition_says(params: SamplingParams, seed: int, ends: set[int]) -> None:
    endings = driven(seed, ends, params)
    expected = definition(seed, ends, params)
    assert [list(ending.token_ids) for ending in endings] == [said for said, _ in expected]
    for ending, (said, value) in zip(endings, expected, strict=True):
        assert score(ending, params.length_penalty) == pytest.approx(value, abs=1e-9)
        stopped = said[-1] in ends
        assert ending.finish_reason == ("stop" if stopped else "length") and ending.stop_reason is None
        for i, entry in enumerate(ending.logprobs):
            values = likely(seed, [*PROMPT, *said[:i]])
            assert (entry.token_id, entry.logprob) == (said[i], values[said[i]])
            assert entry.rank == 1 + sum(value > entry.logprob for value in values)
            assert entry.top == ((values.index(max(values)), max(values)),)


# ---- in an engine


@pytest.mark.parametrize(("backend", "tolerance"), [("reference", 0.0), ("numpy", 1e-4), ("native", 1e-4)])
def test_backends_agree(backend: str, tolerance: float) -> None:
    params = SamplingParams(n=3, best_of=4, use_beam_search=True, max_tokens=6, logprobs=2, length_penalty=0.5)
    said = []
    for name in ("reference", backend):
        core, collector = make_core(backend=name, page_size=16, format="fp32"), Collector()
        core.submit(make_request("r", PROMPT, params), 0.0)
        run_to_end(core, collector)
        assert_idle(core)
        said.append([collector.choices["r", choice] for choice in range(4)])
    for one, other in zip(*said, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token_id, a.rank, len(a.top)) == (b.token_id, b.rank, 2)
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_beside_others_in_chunks_preempted_and_moved_they_are_the_same(backend: str) -> None:
    """`test_same_bytes` does it at random on `reference`; here on `native` too."""
    params = SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=8, logprobs=1, stop_token_ids=(16,))
    prompt = tuple(range(3, 40))

    def engine(**options: Any) -> Any:
        return make_core(backend=backend, page_size=16, **options)

    core, alone = engine(prefix_cache=False), Collector()
    core.submit(make_request("r", prompt, params), 0.0)
    run_to_end(core, alone)
    core, other, found = engine(num_pages=16, max_prefill_chunk=5, max_batched_tokens=9), engine(), Collector()
    for number in range(4):
        drawn = SamplingParams(temperature=1.0, seed=number, max_tokens=9, logprobs=2)
        core.submit(make_request(f"o{number}", prompt[: 9 * number + 1], drawn), 0.0)
    core.submit(make_request("r", prompt, params), 0.0)
    roster = core.scheduler._roster
    while core.scheduler.get("r").branches[0].num_output_tokens < 5:
        found.take(core.step(0.0))
        mine = [branch for branch in roster.running if branch.key[0] == "r"]
        if mine and mine[0].num_output_tokens == 3 and not mine[0].num_preemptions:
            roster.preempt(mine[0], 0.0, "forced")
    saved = json.loads(json.dumps(core.snapshot("r")))
    core.cancel("r")
    run_to_end(core, Collector())
    other.restore(saved, 0.0)
    run_to_end(other, found)
    for choice in range(3):
        assert found.choices["r", choice] == alone.choices["r", choice]
    assert_idle(core)
    assert_idle(other)


def test_one_beam_is_greedy() -> None:
    params = SamplingParams(use_beam_search=True, max_tokens=8)
    core, collector = make_core(), Collector()
    core.submit(make_request("beam", PROMPT, params), 0.0)
    core.submit(make_request("greedy", PROMPT, SamplingParams(temperature=0.0, max_tokens=8)), 0.0)
    run_to_end(core, collector)
    assert collector.choices["beam", 0].tokens == collector.choices["greedy", 0].tokens


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_k": 3}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
)
def test_what_beams_do_not_have_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        SamplingParams(**{"use_beam_search": True, **values})
    assert raised.value.field == field


def test_too_many_ends_are_refused() -> None:
    params = SamplingParams(use_beam_search=True, stop_token_ids=tuple(range(20, 28)))
    request = Request("r", PROMPT, params, eos_token_ids=range(9))
    with pytest.raises(InvalidInput, match="stop_token_ids"):
        make_core().submit(request, 0.0)

"""ModelRunner and its slots: deltas keyed by position, which logits are asked for, counts that follow the tokens."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from engine_harness import make_core, make_request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import PageTableDelta, RowFlags, ScheduledRow, SlotInit
from octavo.core.errors import InvariantBroken
from octavo.core.params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.schema import SCHEMA_NAMES, load_schema
from octavo.engine.slots import Slot

PROMPT = (4, 5, 5, 6)


def make_slot(tokens: tuple[int, ...] = PROMPT, num_groups: int = 1, last_n: int = -1) -> Slot:
    params = SamplingParams(presence_penalty=1.0, repeat_last_n=last_n)
    return Slot(SlotInit(params, 7, tokens, len(PROMPT)), num_groups)


def make_row(start: int, tokens: tuple[int, ...], known: int | None = None, **fields: Any) -> ScheduledRow:
    known = start + len(tokens) if known is None else known
    return ScheduledRow("r", 0, 0, start, tokens, known, 0, RowFlags(), **fields)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=20),
    st.booleans(),
    st.sampled_from([-1, 1, 2, 5]),
    st.lists(st.integers(1, 9), max_size=3),
)
def test_tokens_and_counts_depend_on_positions_not_on_how_often_they_are_sent(
    steps: list[tuple[int, int]], twice: bool, last_n: int, said: list[int]
) -> None:
    known = [*PROMPT, *said]
    slot = make_slot(tuple(known), last_n=last_n)
    for position, token in steps:
        position = min(max(position, len(PROMPT)), len(known))
        known[position:] = [token]  # a rollback may change what follows
        row = make_row(position, (token,))
        slot.update(row)
        if twice:
            slot.update(row)
        assert slot.tokens == known
        first = 0 if last_n < 0 else max(0, len(known) - last_n)
        assert slot.output_counts == Counter(known[max(first, len(PROMPT)) :])
        assert slot.prompt_counts == Counter(PROMPT[first:])


def test_page_deltas_overwrite_grow_and_refuse_gaps() -> None:
    slot = make_slot(num_groups=2)
    deltas = (PageTableDelta(0, 0, (3, 4)), PageTableDelta(1, 0, (8,)), PageTableDelta(0, 0, (-1,)))
    for _ in range(2):
        for delta in deltas:
            slot.place(delta)
        assert slot.pages == [[-1, 4], [8]]
    with pytest.raises(InvariantBroken):
        slot.place(PageTableDelta(1, 3, (9,)))
    with pytest.raises(InvariantBroken):
        slot.update(make_row(6, (1,)))


def test_a_slot_that_was_never_filled_is_an_error_and_a_freed_one_is_forgotten() -> None:
    core = make_core()
    core.submit(make_request("r", PROMPT, SamplingParams(max_tokens=4, temperature=0.0)), 0.0)
    decision = core.scheduler.plan(0.0)
    runner = core.executor.__self__  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken):
        runner.execute(replace(decision, rows=(replace(decision.rows[0], init=None),)))
    result = runner.execute(decision)
    assert runner.execute(decision) == result
    runner.execute(replace(decision, rows=(), freed_slots=(decision.rows[0].slot,)))
    assert runner._slots == {}


def watch_logits(core: EngineCore) -> list[int]:
    """The number of logits rows of every forward pass from now on."""
    rows: list[int] = []
    runner = core.executor.__self__  # type: ignore[attr-defined]
    forward = runner.model.forward

    class Watched:
        def forward(self, ops: Any, weights: Any, batch: Any) -> Any:
            rows.append(len(batch.logit_rows))
            return forward(ops, weights, batch)

    runner.model = Watched()
    return rows


@pytest.mark.parametrize(("prompt_logprobs", "expected"), [(None, [0, 0, 1, 1, 1]), (0, [4, 4, 2, 1, 1])])
def test_logits_are_computed_only_where_somebody_asked(prompt_logprobs: int | None, expected: list[int]) -> None:
    core = make_core(max_prefill_chunk=4)
    rows = watch_logits(core)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=prompt_logprobs)
    core.submit(make_request("r", range(4, 14), params), 0.0)
    while core.has_work:
        core.step(0.0)
    assert rows == expected


def test_the_sampler_gets_each_row_s_own_parameters_noise_coordinates_and_counts() -> None:
    core = make_core(max_prefill_chunk=3)
    runner = core.executor.__self__  # type: ignore[attr-defined]
    asked: list[Any] = []
    process = runner.backend.process_logits

    def watched(logits: Any, rows: Any) -> Any:
        asked.extend(replace(row, output_counts=dict(row.output_counts)) for row in rows)
        return process(logits, rows)

    runner.backend = _Patched(runner.backend, process_logits=watched)
    common = {"temperature": 1.0, "n": 2, "max_tokens": 4, "ignore_eos": True, "frequency_penalty": 0.1}
    params = {seed: SamplingParams(seed=seed, **common) for seed in (3, 8)}
    for seed, one in params.items():
        core.submit(make_request(f"r{seed}", (*PROMPT, seed), one), 0.0)
    outputs: dict[tuple[int, int], list[int]] = {}
    while core.has_work:
        del asked[:]
        before = {key: list(tokens) for key, tokens in outputs.items()}
        for event in core.step(0.0):
            if event.token_id is not None:
                outputs.setdefault((int(event.request_id[1:]), event.choice), []).append(event.token_id)
        for row in asked:
            known = before.get((row.seed, row.choice), [])
            assert row.params is params[row.seed]
            assert row.output_index == len(known)
            assert row.output_counts == Counter(known)
            assert row.prompt_counts == Counter((*PROMPT, row.seed))
    assert sorted(outputs) == [(3, 0), (3, 1), (8, 0), (8, 1)]
    assert all(len(tokens) == 4 for tokens in outputs.values())


class _Patched:
    """A backend with some ops replaced."""

    def __init__(self, backend: Any, **ops: Any) -> None:
        self._backend = backend
        vars(self).update(ops)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_end_tokens_are_banned_before_min_tokens() -> None:
    core = make_core()
    wants_to_end = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=5, logit_bias={2: 100.0})
    core.submit(make_request("r", PROMPT, wants_to_end), 0.0)
    tokens: list[int | None] = []
    while core.has_work:
        tokens += [event.token_id for event in core.step(0.0) if event.token_id is not None]
    assert tokens[5:] == [2]
    assert 2 not in tokens[:5]


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_the_schemas_are_valid_json_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(load_schema(name))))

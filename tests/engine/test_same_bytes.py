"""Promise 1, the same bytes, always: prompt, parameters and seed alone decide the tokens and their logprobs.

Every request is compared, bit for bit, with itself alone: whatever runs beside it, however its prompt is cut, whatever
the page size, whatever was cached, preempted, rolled back, cancelled beside it or moved to another engine.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_harness import (
    FORGETFUL,
    MODELS,
    Choice,
    Collector,
    Oracle,
    alone,
    assert_idle,
    make_core,
    make_request,
    pages_for,
    run_to_end,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lying_trees import is_moved

from octavo.core.errors import RowError
from octavo.core.grammar import Grammar
from octavo.core.params import POOLINGS, SamplingParams
from octavo.core.request import Request

SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "300"))
PAGE_SIZES = (1, 2, 4, 16)

_BASE = [1, 9, 31, 44, 12, 7, 50, 23, 18, 36, 5, 41, 27, 14, 33, 8, 19, 46]
_OTHER = [1, 9, 31, 44, 12, 29, 11, 40, 16]  # leaves the base inside a page of 16, at a border for pages of 1
PROMPTS = [
    tuple(tokens)
    for tokens in (
        _BASE[:1],
        _BASE[:5],
        _BASE[:8],
        _BASE[:9],
        _BASE[:16],
        _BASE,
        [*_BASE[:13], 20, 21, 22],
        [*_BASE, 30, 10, 49, 6],
        _OTHER,
        [4, 4, 4, 4, 4, 4, 4],
    )
]
_LARK = 'start: "de" /[a-c]{1,3}/ (":" /[0-9]+/)*'
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=0),
    SamplingParams(temperature=0.8, max_tokens=7, seed=11, logprobs=0),
    SamplingParams(
        temperature=1.3,
        top_k=9,
        top_p=0.9,
        max_tokens=6,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logprobs=3,
    ),
    SamplingParams(temperature=1.0, max_tokens=8, min_tokens=4, seed=3, logit_bias={2: 6.0, 20: 2.0}, logprobs=1),
    SamplingParams(temperature=1.0, n=3, max_tokens=4, seed=5, logprobs=1, min_p=0.02),
    SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=1, repetition_penalty=1.5),
    SamplingParams(
        temperature=0.7, max_tokens=5, seed=2, allowed_token_ids=tuple(range(3, 40)), logprob_token_ids=(7, 9)
    ),
    SamplingParams(temperature=1.0, max_tokens=9, seed=23, ignore_eos=True, stop_token_ids=(16, 19, 40), logprobs=0),
    SamplingParams(temperature=1.0, max_tokens=9, seed=4, grammar=Grammar("regex", "[a-e]{2}(no|yes|[0-9]{1,4})?")),
    SamplingParams(
        temperature=0.9, max_tokens=8, seed=5, n=2, logprobs=1, presence_penalty=0.5, grammar=Grammar("lark", _LARK)
    ),
    SamplingParams(temperature=0.0, max_tokens=0),
    SamplingParams(
        temperature=0.9,
        typical_p=0.9,
        dry_multiplier=2.0,
        dry_allowed_length=1,
        dry_breaker_ids=(44,),
        no_repeat_ngram_size=3,
        max_tokens=9,
        seed=31,
        logprobs=0,
    ),
    SamplingParams(
        temperature=1.2,
        top_n_sigma=1.5,
        xtc_probability=0.6,
        xtc_threshold=0.05,
        dynatemp_range=0.4,
        banned_sequences=((4, 4), (9,), (31, 44)),
        n=2,
        max_tokens=7,
        min_tokens=3,
        seed=37,
        logprobs=1,
    ),
    *(SamplingParams(max_tokens=0, pooling=kind) for kind in POOLINGS),
]
WIDEST = 3
BRANCHING = [
    SamplingParams(n=2, best_of=WIDEST, use_beam_search=True, max_tokens=6, logprobs=1),
    SamplingParams(n=2, use_beam_search=True, max_tokens=7, stop_token_ids=(5, 19), length_penalty=-1.0, min_tokens=2),
    SamplingParams(n=WIDEST, use_beam_search=True, max_tokens=5, early_stopping="never", logprob_token_ids=(7,)),
    SamplingParams(n=1, best_of=3, temperature=1.2, seed=8, max_tokens=5, frequency_penalty=0.5),
    SamplingParams(n=2, temperature=0.9, seed=1, max_tokens=3, logprobs=0, prompt_logprobs=2),
]
ALL = [*PARAMS, *BRANCHING]


@functools.cache
def baseline(model: str, prompt: int, params: int) -> list[Choice]:
    """The request by itself."""
    return alone(model, PROMPTS[prompt], ALL[params])


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule: which, and when."""

    prompt: int
    params: int
    step: int
    priority: int


@dataclass(frozen=True)
class Trouble:
    """Something that happens at a step: to a request, or to the whole step."""

    step: int
    kind: str
    target: int


TROUBLES = ("cancel", "preempt", "fail before", "fail after", "row error", "move", "flush")
ARRIVALS = st.builds(
    Arrival,
    prompt=st.integers(0, len(PROMPTS) - 1),
    params=st.one_of(st.integers(0, len(PARAMS) - 1), st.integers(len(PARAMS), len(ALL) - 1)),
    step=st.integers(0, 8),
    priority=st.integers(0, 2),
)
SCHEDULE = st.fixed_dictionaries(
    {
        "model": st.sampled_from((*sorted(MODELS), *sorted(MODELS), *FORGETFUL)),
        "page_size": st.sampled_from(PAGE_SIZES),
        "spare_tokens": st.sampled_from((0, 0, 1, 2, 3, 5, 8, 12, 30)),
        "prefix_cache": st.sampled_from((True, True, True, False)),
        "host_pages": st.sampled_from((0, 0, 3, 40)),
        "drafts": st.sampled_from((0, 0, 1, 3, 7)),
        "lies": st.sampled_from((0, 1, 3, 8)),
        "trees": st.booleans(),
        "scheduling": st.fixed_dictionaries(
            {
                "max_prefill_chunk": st.integers(1, 24),
                "max_batched_tokens": st.integers(1, 40),
                "max_running_requests": st.integers(2, 8),
                "prefix_wait_steps": st.sampled_from((0, 2, 64)),
                "policy": st.sampled_from(("fcfs", "priority")),
                "max_preemptions": st.sampled_from((0, 2, 8)),
                "preemption": st.sampled_from(("auto", "swap", "recompute")),
            }
        ),
        "arrivals": st.lists(ARRIVALS, min_size=3, max_size=6),
        "troubles": st.lists(
            st.builds(Trouble, st.integers(1, 10), st.sampled_from(TROUBLES), st.integers(0, 5)), max_size=6
        ),
    }
)


class Run:
    """One schedule, played to its end on one engine (and a second one that requests are moved to)."""

    def __init__(self, plan: dict[str, Any], seen: Counter[str]) -> None:
        self.plan, self.seen = plan, seen
        self.model = plan["model"]
        if self.model == "h2o":  # refuses beams
            arrivals = [replace(a, params=0) if ALL[a.params].use_beam_search else a for a in plan["arrivals"]]
            self.plan = {**plan, "arrivals": arrivals}
        self.cores = [self._core(plan["page_size"]), self._core(PAGE_SIZES[plan["spare_tokens"] % 4])]
        for core in self.cores:
            self._intercept(core)
        self.collector = Collector()
        self.live: dict[str, int] = {}  # request id -> engine
        self.doomed: set[str] = set()  # may end early: cancelled, or charged with an error
        self.failures: list[Trouble] = []  # due

    def _core(self, page_size: int) -> Any:
        # room for the longest request alone, and little more: preemptions come by themselves
        asked = [
            (len(PROMPTS[a.prompt]) + (ALL[a.params].max_tokens or 0), ALL[a.params]) for a in self.plan["arrivals"]
        ]
        widths = [params.num_branches if params.use_beam_search else 1 for _, params in asked]
        needed = [
            width * pages_for(self.model, page_size, length) for (length, _), width in zip(asked, widths, strict=True)
        ]
        pages = max(needed) + pages_for(self.model, page_size, self.plan["spare_tokens"])
        scheduling = dict(self.plan["scheduling"])
        for name in ("max_batched_tokens", "max_running_requests"):
            scheduling[name] = max(scheduling[name], *widths)  # beams are drawn in one step
        core = make_core(
            self.model,
            page_size=page_size,
            num_pages=pages,
            prefix_cache=self.plan["prefix_cache"],
            host_pages=self.plan["host_pages"] if self.plan["prefix_cache"] else 0,
            **scheduling,
        )
        if self.plan["drafts"]:
            most, lies, trees = (self.plan[name] for name in ("drafts", "lies", "trees"))
            core.speculator = Oracle(self._said, most, lies, trees=trees and self.model not in FORGETFUL)
        return core

    def _said(self, request_id: str, choice: int) -> list[int]:
        arrival = self.plan["arrivals"][int(request_id[1:])]
        return baseline(self.model, arrival.prompt, arrival.params)[choice].tokens

    def _intercept(self, core: Any) -> None:
        execute = core.executor

        def run(decision: Any) -> Any:
            suspects = {
                row.request_id if self._has_beams(row) else (row.request_id, row.choice) for row in decision.rows
            }
            trouble = self.failures.pop(0) if self.failures and len(suspects) > 1 else None
            self.seen["no_write"] += any(row.flags.no_write for row in decision.rows)
            self.seen["copies"] += bool(decision.copies)
            self.seen["drafts"] += any(row.num_drafts for row in decision.rows)
            self.seen["preemptions"] += len(decision.preemptions)
            self.seen["compactions"] += any(row.compaction for row in decision.rows)
            if trouble is None:
                result = execute(decision)
                self.seen["moved drafts"] += any(map(is_moved, decision.rows, result.rows))
                return result
            self.seen[trouble.kind] += 1
            if trouble.kind == "row error":
                row = trouble.target % len(decision.rows)
                self.doomed.add(decision.rows[row].request_id)
                raise RowError([row], "injected")
            if trouble.kind == "fail after":
                execute(decision)
            raise OSError("injected")

        core.executor = run

    def _has_beams(self, row: Any) -> bool:
        return ALL[self.plan["arrivals"][int(row.request_id[1:])].params].use_beam_search

    def play(self) -> None:
        arrivals = sorted(enumerate(self.plan["arrivals"]), key=lambda pair: pair[1].step)
        step = 0
        while arrivals or any(core.has_work for core in self.cores):
            while arrivals and arrivals[0][1].step <= step:
                self._submit(*arrivals.pop(0))
            for trouble in self.plan["troubles"]:
                if trouble.step == step:
                    self._make(trouble)
            for core in self.cores:
                self.collector.take(core.step(float(step)))
            step += 1
            assert step < 3000, "no progress"
        for core in self.cores:
            assert_idle(core)

    def _submit(self, index: int, arrival: Arrival) -> None:
        request_id = f"r{index}"
        request = make_request(
            request_id, PROMPTS[arrival.prompt], ALL[arrival.params], self.model, priority=arrival.priority
        )
        self.cores[0].submit(request, 0.0)
        self.live[request_id] = 0

    def _make(self, trouble: Trouble) -> None:
        if trouble.kind in ("fail before", "fail after", "row error"):
            self.failures.append(trouble)
        elif trouble.kind == "flush":
            self.seen["flush"] += self.cores[0].kv.flush_prefix_cache() > 0
        elif trouble.kind == "preempt":
            self._preempt(trouble.target)
        else:
            live = [request_id for request_id in self.live if request_id not in self.collector.ended]
            if live:
                request_id = live[trouble.target % len(live)]
                getattr(self, f"_{trouble.kind}")(request_id, self.live[request_id])

    def _cancel(self, request_id: str, where: int) -> None:
        self.seen["cancel"] += 1
        self.doomed.add(request_id)
        self.cores[where].cancel(request_id)

    def _preempt(self, target: int) -> None:
        """Take the pages of one running branch of each engine, as a step that ran out of them would."""
        for core in self.cores:
            roster = core.scheduler._roster
            if roster.running:
                self.seen["forced preemption"] += 1
                roster.preempt(roster.running[target % len(roster.running)], 0.0, "forced")

    def _move(self, request_id: str, where: int) -> None:
        """Snapshot it, forget it here, and go on in the other engine."""
        other = 1 - where
        core = self.cores[where]
        if core.scheduler.get(request_id) is None or self.cores[other].scheduler._roster.knows(request_id):
            return
        saved = core.snapshot(request_id)
        core.cancel(request_id)
        self.collector.take(e for e in self._quiet_step(core) if e.request_id != request_id)
        self.cores[other].restore(saved, 0.0)
        self.live[request_id] = other
        self.seen["move"] += 1

    def _quiet_step(self, core: Any) -> list[Any]:
        failures, self.failures = self.failures, []
        events = core.step(0.0)
        self.failures = failures
        return list(events)

    def check(self) -> None:
        for index, arrival in enumerate(self.plan["arrivals"]):
            request_id = f"r{index}"
            self.seen["prefix hits"] += self.collector.cached.get(request_id, 0) > 0
            for choice, expected in enumerate(baseline(self.model, arrival.prompt, arrival.params)):
                got = self.collector.choices[request_id, choice]
                if request_id in self.doomed:
                    count = len(got.tokens)
                    assert got.tokens == expected.tokens[:count]
                    assert got.logprobs == expected.logprobs[:count]
                else:
                    assert got == expected, (request_id, choice)


def test_tokens_and_logprobs_depend_on_nothing_else() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=SCHEDULES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(SCHEDULE)
    def play(plan: dict[str, Any]) -> None:
        run = Run(plan, seen)
        run.play()
        run.check()

    play()
    if SCHEDULES < 300:
        return
    # a guard that never met its danger proves nothing
    dangers = (
        *("forced preemption", "preemptions", "prefix hits", "copies", "no_write", "drafts", "moved drafts"),
        "compactions",
    )
    for kind in (*TROUBLES[:1], *TROUBLES[2:], *dangers):
        assert seen[kind] > 0, (kind, seen)


@pytest.mark.parametrize("model", [*sorted(MODELS), *FORGETFUL])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_chunk_size_from_one(model: str, page_size: int) -> None:
    prompt, params = 7, 6
    for chunk in range(1, len(PROMPTS[prompt]) + 2):
        core, collector = make_core(model, page_size=page_size, max_prefill_chunk=chunk), Collector()
        core.submit(make_request("r", PROMPTS[prompt], PARAMS[params], model), 0.0)
        run_to_end(core, collector)
        assert [collector.choices["r", 0]] == baseline(model, prompt, params), chunk
        assert_idle(core)


def shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two prompts have in common at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def run_after(model: str, page_size: int, first: int, then: int, wait: bool) -> tuple[int, list[Choice]]:
    """Prompt ``first``, then prompt ``then`` (after it has ended, or while it runs): cached tokens and choices."""
    core, collector = make_core(model, page_size=page_size, max_prefill_chunk=4), Collector()
    core.submit(make_request("first", PROMPTS[first], PARAMS[0], model), 0.0)
    if wait:
        run_to_end(core, collector)
    core.submit(make_request("then", PROMPTS[then], PARAMS[2], model), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    assert [collector.choices["first", 0]] == baseline(model, first, 0)
    return collector.cached["then"], [collector.choices["then", 0]]


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("first", "then", "wait"),
    [
        pytest.param(4, 4, True, id="whole prompt cached"),
        pytest.param(5, 7, True, id="a longer prompt"),
        pytest.param(5, 6, True, id="leaves inside a page"),
        pytest.param(7, 3, True, id="a shorter prompt"),
        pytest.param(5, 7, False, id="in the same batch"),
    ],
)
def test_prefix_hits(model: str, page_size: int, first: int, then: int, wait: bool) -> None:
    cached, choices = run_after(model, page_size, first, then, wait)
    assert choices == baseline(model, then, 2)
    shared = shared_length(PROMPTS[first], PROMPTS[then])
    if wait:
        assert cached >= min(shared, len(PROMPTS[then]) - 1) - (shared % page_size if model == "gemma3" else 0)
    else:
        assert cached >= 4 if page_size <= 4 else True


def test_a_prefix_being_computed_is_waited_for_and_computed_once() -> None:
    core, collector = make_core("llama", max_prefill_chunk=4, num_pages=400), Collector()
    for i in range(32):
        core.submit(make_request(f"r{i}", PROMPTS[7], PARAMS[0]), 0.0)
    run_to_end(core, collector)
    for i in range(32):
        assert [collector.choices[f"r{i}", 0]] == baseline("llama", 7, 0)
    computed = core.metrics.scheduled_tokens - 32 * (len(baseline("llama", 7, 0)[0].tokens) - 1)
    assert computed <= len(PROMPTS[7]) + 31 * 4  # each of the others computes less than a page anew


def test_seeds_and_choices_do_not_repeat_each_other() -> None:
    choices = baseline("llama", 5, 5)
    assert len({tuple(choice.tokens) for choice in choices}) > 1
    other = alone("llama", PROMPTS[5], replace(PARAMS[5], seed=6))
    assert [c.tokens for c in other] != [c.tokens for c in choices]


def test_snapshots_survive_json_at_every_token() -> None:
    import json

    for moment in range(8):
        core, collector = make_core("llama"), Collector()
        core.submit(make_request("r", PROMPTS[5], PARAMS[3]), 0.0)
        for _ in range(moment):
            collector.take(core.step(0.0))
        if core.scheduler.get("r") is None:
            break
        saved = json.loads(json.dumps(core.snapshot("r")))
        assert Request.restore(saved).snapshot() == saved | {"branches": Request.restore(saved).snapshot()["branches"]}
        other = make_core("llama", page_size=2)
        other.restore(saved, 0.0)
        run_to_end(other, collector)
        assert [collector.choices["r", 0]] == baseline("llama", 5, 3), moment


def test_a_long_mixed_run() -> None:
    """One engine that is never fresh: two hundred requests through a small pool, the cache warm and under pressure."""
    rng = random.Random(5)
    core, collector = make_core("llama", num_pages=12, max_batched_tokens=24, max_running_requests=6), Collector()
    asked = []
    for i in range(200):
        asked.append((rng.randrange(len(PROMPTS)), rng.randrange(len(PARAMS))))
        core.submit(make_request(f"r{i}", PROMPTS[asked[-1][0]], PARAMS[asked[-1][1]]), 0.0)
        if rng.random() < 0.7:
            collector.take(core.step(0.0))
    run_to_end(core, collector)
    assert_idle(core)
    for i, (prompt, params) in enumerate(asked):
        got = [collector.choices[f"r{i}", choice] for choice in range(PARAMS[params].n)]
        assert got == baseline("llama", prompt, params), i
    assert core.metrics.preemptions > 0

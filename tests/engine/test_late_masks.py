"""A mask that takes its time holds up nobody else, and changes no byte."""

import threading
from functools import partial

import pytest
from engine_harness import Collector, make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.grammar import GrammarFault
from octavo.engine.mask_thread import MaskThread
from octavo.engine.overlap import StepThread

SLOW = SamplingParams(max_tokens=9, seed=2, grammar=Grammar("regex", "[a-e]{6}"))
FAST = SamplingParams(max_tokens=9, seed=3, grammar=Grammar("regex", "[a-e]{8}"))
PLAIN = SamplingParams(max_tokens=9, seed=1)


class Gate:
    """Has matchers of one grammar wait before each mask, in another thread, for as long as it is closed."""

    def __init__(self, core, grammar):
        self.open, self.waiting, self.core = threading.Event(), threading.Semaphore(0), core
        self.engine, self.fails = threading.current_thread(), False
        real = core.grammars.matcher

        def matcher(asked):
            found = real(asked)
            if asked == grammar:
                mask = found.mask
                found.mask = lambda: self.pass_on(mask)
            return found

        core.grammars.matcher = matcher

    def pass_on(self, mask):
        assert threading.current_thread() is not self.engine, "a step waits for a mask"
        self.waiting.release()
        self.open.wait()
        if self.fails:
            raise GrammarFault("it is too ambiguous here")
        return mask()


def run(core, collector, until=lambda: False, most=10_000):
    for _ in range(most):
        if until() or not core.has_work:
            return
        collector.take(core.step(0.0))
    raise AssertionError("no end")


def alone(params):
    core, collector = make_core(), Collector()
    core.submit(make_request("r", [1, 5, 9], params), 0.0)
    run(core, collector)
    return collector.choices["r", 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_others_end_while_a_mask_is_made(overlap):
    core, collector = make_core(max_batched_tokens=8), Collector()
    core._thread = StepThread(core.executor) if overlap else None
    gate = Gate(core, SLOW.grammar)
    core.forcing.patience = 0.0
    for name, params in (("slow", SLOW), ("fast", FAST), ("plain", PLAIN), ("slow2", SLOW)):
        core.submit(make_request(name, [1, 5, 9], params), 0.0)
    others = [("fast", 0), ("plain", 0)]
    run(core, collector, lambda: all(k in collector.choices and collector.choices[k].finish_reason for k in others))
    assert [collector.choices[key] for key in others] == [alone(FAST), alone(PLAIN)]
    assert all(not collector.choices[key].tokens for key in collector.choices if key not in others)
    assert core.scheduler.num_running + core.scheduler.num_waiting == 2 == len(core.forcing.held)
    core.cancel("slow2")
    gate.open.set()
    run(core, collector)
    assert collector.choices["slow", 0] == alone(SLOW)
    assert collector.choices["slow2", 0].finish_reason == "cancelled"
    core.close()


def test_a_mask_that_fails_late_ends_its_own_request():
    core, collector = make_core(), Collector()
    gate = Gate(core, SLOW.grammar)
    core.grammars.apart = core.grammars.matcher
    core.forcing.patience = 0.0
    core.submit(make_request("slow", [1, 5, 9], SLOW), 0.0)
    core.submit(make_request("plain", [1, 5, 9], PLAIN), 0.0)
    run(core, collector, lambda: collector.choices.get(("plain", 0)) and collector.choices["plain", 0].finish_reason)
    gate.fails = True
    gate.open.set()
    run(core, collector)
    assert collector.choices["slow", 0].finish_reason == "error"
    assert "the grammar cannot be followed: it is too ambiguous here" in collector.choices["slow", 0].error
    assert collector.choices["plain", 0] == alone(PLAIN)


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6))
def test_every_job_is_done_once_whoever_is_late(batches):
    """True: a job that does not end before all batches were given."""
    thread, free, done, late = MaskThread(), threading.Event(), threading.Semaphore(0), 0
    counts = []

    def job(number, waits):
        if waits:
            free.wait()
        counts[number] += 1
        done.release()

    for batch in batches:
        jobs = []
        for waits in batch:
            jobs.append(partial(job, len(counts), waits))
            counts.append(0)
        thread.run(jobs, 0.0)
        late += sum(batch)
        for _ in range(1000):  # as an engine does with every step
            if sum(counts) == len(counts) - late:
                break
            thread.run([], 0.01)
        assert sum(counts) == len(counts) - late, "who is not late waits for one who is"
    for _ in range(len(counts) - late):
        assert done.acquire(timeout=60)
    assert sum(counts) == len(counts) - late
    free.set()
    for _ in range(late):
        assert done.acquire(timeout=60)
    assert counts == [1] * len(counts)
    thread.close()


def test_those_behind_one_who_is_late_are_done_at_once():
    thread, free, done = MaskThread(), threading.Event(), threading.Semaphore(0)
    thread.run([free.wait, done.release, done.release], 0.01)
    assert done.acquire(timeout=60) and done.acquire(timeout=60)
    free.set()
    thread.close()

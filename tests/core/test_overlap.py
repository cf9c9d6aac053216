"""One step in flight while the next is planned: the same tokens, and nothing of what came too late."""

from __future__ import annotations

from builders import Bench, make_kv, make_request
from hypothesis import given
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import PLANS, Run, worlds

from octavo.core.batch import StepResult
from octavo.core.errors import RowError


class OverlappedRun(Run):
    """Each step is planned while the one before it runs, and runs before or after that one's commit."""

    def __init__(self, world, plans, early, fails):
        super().__init__(world, plans)
        self.early, self.fails = early, fails
        self.running, self.found = None, None  # what runs, and its result if it is there already
        self.num_ahead = 0
        self.model.always_draws = True

    def execute(self, decision):
        """The result, or the error it failed with."""
        if self.fails and decision.step % self.fails == 0 and decision.rows:
            self.blamed.add(decision.rows[0].request_id)
            self.model.fault = lambda decision: RowError([0], "broken")
        try:
            return self.model(decision)
        except RowError as error:
            return error
        finally:
            self.model.fault = None

    def tick(self):
        early, late = self.inputs()
        for act in early:
            act()
        if self.running is None and self.clock % 3:  # drafts are for plans that are not made ahead
            self.propose()
        decision = self.running or self.scheduler.plan(self.clock, self.world.budget)
        result = self.found or (self.execute(decision) if decision.rows else StepResult(decision.step, ()))
        self.running = self.found = None
        self.num_ahead += self.scheduler.plan_ahead(self.clock)
        for act in late:
            act()
        asked = set(self.cancelling)
        if isinstance(result, Exception):
            events = self.scheduler.rollback(result, self.clock)
        else:
            self.running = self.scheduler.advance(result)
            if self.running is not None and self.early:
                self.found = self.execute(self.running)
            events = self.scheduler.commit(result, self.clock)
        self.cancelled |= asked if decision.rows else set()
        self.take(events)
        self.scheduler.audit()
        self.check_counters()
        self.clock += 1


@given(
    world=worlds(),
    plans=st.lists(PLANS, min_size=1, max_size=8),
    early=st.booleans(),
    fails=st.sampled_from([0, 0, 0, 5, 7]),
)
def test_the_same_tokens_and_nothing_late(world, plans, early, fails):
    OverlappedRun(world, plans, early, fails).play()


def pipelined(bench, before_commit=lambda: None):
    """Run a bench with overlap; how many steps were planned ahead."""
    scheduler, running, ahead = bench.scheduler, None, 0
    bench.model.always_draws = True
    while scheduler.has_work:
        decision = running or scheduler.plan()
        result = bench.model(decision) if decision.rows else StepResult(decision.step, ())
        ahead += scheduler.plan_ahead()
        running = scheduler.advance(result)
        before_commit()
        bench.events += scheduler.commit(result)
        scheduler.audit()
    return ahead


def test_decodes_are_planned_ahead():
    bench = Bench().submit(make_request("a", max_tokens=20), make_request("b", max_tokens=12))
    assert pipelined(bench) == 18  # all steps but the one with the prompts and the last
    assert bench.tokens("a") == null_tokens((1, 2, 3), 20, 7) and bench.reason("a") == "length"
    assert bench.tokens("b") == null_tokens((1, 2, 3), 12, 7)


def test_an_end_found_one_step_late_tells_nothing_and_keeps_its_pages_until_then():
    out = null_tokens((1, 2, 3), 9, 7)
    last = next(i for i in range(3, 9) if out[i] not in out[:i])
    bench = Bench().submit(make_request("a", max_tokens=20, stop_token_ids=[out[last]]))
    ticketed = []
    pipelined(bench, lambda: ticketed.append(bench.kv.usage().pages.ticketed))
    assert bench.tokens("a") == out[: last + 1] and bench.reason("a") == "stop"
    assert bench.model.decisions[-1].rows[0].output_index == last + 1, "nothing was computed too late"
    assert bench.kv.usage().pages.ticketed == bench.kv.usage().pages.referenced == 0


def test_what_was_planned_ahead_is_taken_back_when_the_step_before_it_fails():
    bench = Bench(make_kv(page_size=1)).submit(make_request("a", max_tokens=5), make_request("b", max_tokens=5))
    scheduler = bench.scheduler
    for _ in range(2):
        scheduler.commit(bench.model(scheduler.plan()))
    held = bench.kv.usage().pages
    scheduler.plan()
    assert scheduler.plan_ahead() and not scheduler.plan_ahead()
    assert bench.kv.usage().pages.referenced == held.referenced + 4
    scheduler.rollback(RowError([0], "broken"))
    scheduler.audit()
    bench.events.clear()
    bench.run()
    assert bench.reason("b") == "length" and scheduler.get("a") is None


def test_nothing_is_planned_ahead_of_somebody_who_waits():
    bench = Bench(max_running_requests=1).submit(make_request("a", max_tokens=9))
    scheduler = bench.scheduler
    assert not scheduler.plan_ahead()
    scheduler.commit(bench.model(scheduler.plan()))
    bench.model(scheduler.plan())
    bench.submit(make_request("b"))
    assert not scheduler.plan_ahead()


def test_nothing_is_planned_ahead_of_a_deadline_that_has_passed():
    """Found by simulation: only `plan` ends what is late, and there was none while steps were planned ahead."""
    bench = Bench().submit(make_request("a", max_tokens=9), make_request("b", max_tokens=9, deadline=5.0))
    scheduler = bench.scheduler
    scheduler.commit(bench.model(scheduler.plan(0.0)), 0.0)
    scheduler.plan(1.0)
    assert not scheduler.plan_ahead(5.0) and scheduler.plan_ahead(4.0)


def test_without_pages_for_it_no_step_is_planned_ahead():
    ahead = {}
    for pages in (5, 20):
        bench = Bench(make_kv(pages, 4, enable_prefix_cache=False), max_seq_len=20)
        bench.submit(make_request("a", max_tokens=9), make_request("b", [4, 5, 6], max_tokens=9))
        ahead[pages] = pipelined(bench)
        assert bench.tokens("a") == null_tokens((1, 2, 3), 9, 7) and bench.tokens("b") == null_tokens((4, 5, 6), 9, 7)
    assert 0 < ahead[5] < ahead[20]

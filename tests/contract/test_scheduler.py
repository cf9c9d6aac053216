"""ContinuousBatchScheduler.submit / cancel / step: budgets, boundaries, service in a finite number of steps."""

from __future__ import annotations

import random
import unittest

from octavo.core.batch import RowResult, ScheduleDecision, StepResult
from octavo.core.events import EventKind
from octavo.core.kv import KVCacheManager
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig


class Executor:
    """Stands in for a model: every sampling row gets a token that names its request; decisions are kept."""

    def __init__(self) -> None:
        self.decisions: list[ScheduleDecision] = []

    def __call__(self, decision: ScheduleDecision) -> StepResult:
        self.decisions.append(decision)
        rows = [RowResult(token_ids=(7 + row.output_index % 5,) if row.flags.sample else ()) for row in decision.rows]
        return StepResult(decision.step, tuple(rows))


def make(num_pages: int = 32, page_size: int = 4, **settings: int) -> tuple[ContinuousBatchScheduler, Executor]:
    defaults = {"max_batched_tokens": 16, "max_running_requests": 4, "max_prefill_chunk": 8, "max_seq_len": 64}
    executor = Executor()
    config = SchedulerConfig(**{**defaults, **settings})
    kv = KVCacheManager(num_pages, page_size)
    return ContinuousBatchScheduler(kv, config, vocab_size=32, executor=executor), executor


def request(name: str, prompt: int = 5, max_tokens: int = 4, first: int = 8) -> Request:
    tokens = [(first + i) % 31 + 1 for i in range(prompt)]
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def run(scheduler: ContinuousBatchScheduler, budget: int = 16, most: int = 2000) -> list:
    events: list = []
    while scheduler.has_work:
        most -= 1
        if most < 0:
            raise AssertionError("the scheduler makes no progress")
        scheduler.step(budget)
        scheduler.audit()
        events += scheduler.drain_events()
    return events


class Budgets(unittest.TestCase):
    def test_a_budget_that_is_not_positive_is_refused(self) -> None:
        scheduler, _ = make()
        scheduler.submit(request("a"))
        for budget in (0, -1):
            with self.assertRaises(ValueError):
                scheduler.step(budget)
        scheduler.audit()

    def test_three_budgets_hold_in_every_step(self) -> None:
        for seed in range(6):
            rng = random.Random(seed)
            tokens, sequences, chunk = rng.randint(4, 20), rng.randint(1, 4), rng.randint(1, 9)
            scheduler, executor = make(
                max_batched_tokens=tokens, max_running_requests=sequences, max_prefill_chunk=chunk
            )
            for i in range(8):
                scheduler.submit(request(f"r{i}", rng.randint(1, 20), rng.randint(0, 6), 8 + i))
            budget = rng.randint(1, tokens)
            run(scheduler, budget)
            for decision in executor.decisions:
                self.assertLessEqual(decision.num_scheduled_tokens, budget)
                self.assertLessEqual(decision.num_scheduled_sequences, sequences)
                for row in decision.rows:
                    self.assertLessEqual(row.num_scheduled_tokens, max(chunk, 1))

    def test_decodes_come_first_and_mix_with_prefill_in_one_step(self) -> None:
        scheduler, executor = make(max_batched_tokens=6, max_prefill_chunk=5)
        scheduler.submit(request("first", 3, 10))
        scheduler.step(6)
        scheduler.submit(request("second", 12, 2, 20))
        scheduler.step(6)
        rows = executor.decisions[-1].rows
        self.assertEqual([(r.request_id, r.num_scheduled_tokens) for r in rows], [("first", 1), ("second", 5)])

    def test_a_step_without_work_is_empty(self) -> None:
        scheduler, _ = make()
        self.assertEqual(scheduler.step(4).rows, ())


class Boundaries(unittest.TestCase):
    def refused(self, scheduler: ContinuousBatchScheduler, bad: Request, *words: str) -> None:
        with self.assertRaises(ValueError) as caught:
            scheduler.submit(bad)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_what_is_refused_at_submit(self) -> None:
        scheduler, _ = make()
        self.refused(scheduler, Request("empty", []), "prompt")
        self.refused(scheduler, Request("outside", [1, 32]), "32")
        self.refused(scheduler, request("long", 65), "65")
        scheduler.submit(request("a"))
        self.refused(scheduler, request("a"), "a")
        run(scheduler)
        self.refused(scheduler, request("a"), "a")

    def test_what_can_never_fit_is_refused_at_once(self) -> None:
        scheduler, _ = make(num_pages=2, page_size=4)
        self.refused(scheduler, request("big", 20, 4), "page")
        scheduler.submit(request("fits", 4, 4))
        self.assertEqual(sum(e.kind == EventKind.TOKEN for e in run(scheduler)), 4)

    def test_no_tokens_asked_for(self) -> None:
        scheduler, _ = make()
        scheduler.submit(request("none", 5, 0))
        events = run(scheduler)
        self.assertEqual([e.kind for e in events], [EventKind.CHOICE_END, EventKind.REQUEST_END])
        self.assertTrue(all(e.finish_reason == "length" for e in events))

    def test_a_single_token_prompt(self) -> None:
        scheduler, _ = make()
        scheduler.submit(request("one", 1, 3))
        self.assertEqual(sum(e.kind == EventKind.TOKEN for e in run(scheduler)), 3)


class Cancelling(unittest.TestCase):
    def test_after_cancel_no_token_at_any_moment(self) -> None:
        for steps in range(8):
            scheduler, _ = make(max_prefill_chunk=2)
            scheduler.submit(request("gone", 7, 5))
            scheduler.submit(request("stays", 4, 5, 20))
            before: list = []
            for _ in range(steps):
                scheduler.step(16)
                before += scheduler.drain_events()
            scheduler.cancel("gone")
            scheduler.cancel("gone")
            after = run(scheduler)
            mine = [e for e in after if e.request_id == "gone"]
            self.assertFalse([e for e in mine if e.kind == EventKind.TOKEN])
            if not any(e.request_id == "gone" and e.kind == EventKind.REQUEST_END for e in before):
                self.assertEqual([e.kind for e in mine], [EventKind.CHOICE_END, EventKind.REQUEST_END])
                self.assertEqual(mine[-1].finish_reason, "cancelled")
            stays = [e for e in before + after if e.request_id == "stays" and e.kind == EventKind.TOKEN]
            self.assertEqual(len(stays), 5)
            self.assertEqual(scheduler.kv.usage().pages.referenced, 0)

    def test_cancelling_after_the_end_changes_nothing(self) -> None:
        scheduler, _ = make()
        scheduler.submit(request("a"))
        run(scheduler)
        scheduler.cancel("a")
        self.assertEqual(run(scheduler), [])
        scheduler.audit()


class Service(unittest.TestCase):
    def test_short_requests_overtake_a_long_one_s_tail(self) -> None:
        scheduler, _ = make(max_batched_tokens=8, max_prefill_chunk=4)
        scheduler.submit(request("long", 40, 20))
        for i in range(3):
            scheduler.submit(request(f"short{i}", 2, 2, 10 + i))
        order = [e.request_id for e in run(scheduler) if e.kind == EventKind.REQUEST_END]
        self.assertEqual(order[-1], "long")

    def test_everyone_is_served_in_a_bounded_number_of_steps(self) -> None:
        for seed in range(6):
            rng = random.Random(seed)
            scheduler, executor = make(num_pages=rng.randint(8, 14), max_batched_tokens=8, max_running_requests=3)
            work = 0
            for i in range(14):
                prompt, tokens = rng.randint(1, 16), rng.randint(1, 8)
                work += prompt + tokens
                scheduler.submit(request(f"r{i}", prompt, tokens, 8 + i))
            ends = [e for e in run(scheduler) if e.kind == EventKind.REQUEST_END]
            self.assertEqual(len(ends), 14)
            self.assertTrue(all(e.finish_reason == "length" for e in ends), [e.finish_reason for e in ends])
            # each step moves at least one token, also when pages run out and work is done again
            self.assertLessEqual(len(executor.decisions), 4 * work)

    def test_lower_priority_numbers_go_first(self) -> None:
        scheduler, _ = make(max_running_requests=1, policy="priority")
        for name, priority in (("late", 5), ("soon", 1), ("now", 0)):
            r = Request(name, [8, 9, 10 + priority], SamplingParams(max_tokens=2, temperature=0.0), priority=priority)
            scheduler.submit(r)
        order = [e.request_id for e in run(scheduler) if e.kind == EventKind.REQUEST_END]
        self.assertEqual(order, ["now", "soon", "late"])

    def test_tokens_arrive_in_order_and_ends_come_last(self) -> None:
        scheduler, _ = make()
        for i in range(5):
            scheduler.submit(request(f"r{i}", 3 + i, 4, 8 + i))
        events = run(scheduler)
        for i in range(5):
            mine = [e for e in events if e.request_id == f"r{i}"]
            self.assertEqual([e.index for e in mine if e.kind == EventKind.TOKEN], [0, 1, 2, 3])
            self.assertEqual([e.kind for e in mine[4:]], [EventKind.CHOICE_END, EventKind.REQUEST_END])

    def test_a_decision_is_plain_and_says_why(self) -> None:
        scheduler, executor = make(max_prefill_chunk=2)
        scheduler.submit(request("a", 5, 2))
        run(scheduler)
        for decision in executor.decisions:
            for row in decision.rows:
                self.assertTrue(row.reason)
                self.assertIsInstance(row.slot, int)
        self.assertTrue(all(isinstance(d.step, int) for d in executor.decisions))


if __name__ == "__main__":
    unittest.main()

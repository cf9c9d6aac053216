"""InferenceEngine.submit / stream / cancel over the tiny models: golden tokens, boundaries, isolation, faults."""

from __future__ import annotations

import random
import unittest
from typing import Any

from contract_support import (
    TINY,
    TWO_GROUPS,
    assert_idle,
    engine,
    finish_reason,
    fixture,
    random_prompt,
    tokens_of,
)

from octavo.core.errors import InvalidInput, OutOfPages
from octavo.core.events import EventKind
from octavo.core.params import SamplingParams
from octavo.engine.scenario import run_scenario


def golden_run(case: Any, path: Any, **settings: Any) -> Any:
    """Run the fixture's scenario and compare tokens, ids, reasons and ends with the golden ones."""
    loaded, running = fixture(path), engine(path, **settings)
    outcomes = run_scenario(running, loaded.scenario["requests"])
    for name, outcome in outcomes.items():
        golden = loaded.golden[name]
        case.assertTrue(all(event.request_id == name for event in outcome.events))
        if outcome.finish_reason == "cancelled":
            case.assertEqual(outcome.token_ids, golden["token_ids"][: len(outcome.token_ids)], name)
            continue
        case.assertEqual(outcome.token_ids, golden["token_ids"], (name, settings))
        case.assertEqual(outcome.finish_reason, golden["finish_reason"], name)
    assert_idle(case, running)
    return running, outcomes


class GoldenTokens(unittest.TestCase):
    def test_the_scenario_as_it_stands(self) -> None:
        for path in (TINY, TWO_GROUPS):
            running, outcomes = golden_run(self, path)
            self.assertEqual(outcomes["cancelled"].finish_reason, "cancelled")
            self.assertGreaterEqual(len(outcomes["cancelled"].token_ids), 3)
            self.assertEqual(outcomes["nothing"].token_ids, [])
            self.assertEqual(running.metrics()["finished"]["cancelled"], 1)

    def test_every_page_size(self) -> None:
        for page_size in (1, 2, 16):
            golden_run(self, TINY, page_size=page_size, num_pages=48 * 4 // page_size)
        golden_run(self, TWO_GROUPS, page_size=2, num_pages=96)

    def test_every_chunk_size(self) -> None:
        for chunk in (1, 2, 3, 5, 7, 16):
            golden_run(self, TINY, max_prefill_chunk=chunk)
        golden_run(self, TWO_GROUPS, max_prefill_chunk=3)

    def test_one_at_a_time_and_without_the_prefix_cache(self) -> None:
        golden_run(self, TINY, max_running_requests=1)
        golden_run(self, TINY, prefix_cache=False)

    def test_with_too_little_memory_for_all_at_once(self) -> None:
        running, _ = golden_run(self, TINY, num_pages=14)
        self.assertGreater(running.metrics()["preemptions"], 0)


class Boundaries(unittest.TestCase):
    def refused(self, field: str, *arguments: Any, **keywords: Any) -> None:
        running = engine()
        with self.assertRaises(ValueError) as caught:
            running.submit(*arguments, **keywords)
        error = caught.exception
        self.assertIsInstance(error, InvalidInput)
        self.assertIn(field, error.field)
        self.assertTrue(error.remedy)
        self.assertFalse(running.core.has_work)
        assert_idle(self, running)

    def test_empty_prompt(self) -> None:
        self.refused("prompt", [], 4)

    def test_token_outside_the_vocabulary(self) -> None:
        self.refused("prompt", [1, 56], 4)
        self.refused("prompt", [1, -1], 4)
        self.refused("prompt", [1, "a"], 4)

    def test_prompt_over_the_context(self) -> None:
        self.refused("prompt", [5] * 97, 4)
        self.refused("prompt", [5] * 96, 4)

    def test_more_than_the_page_pool_can_ever_hold(self) -> None:
        running = engine(num_pages=4)
        with self.assertRaises(ValueError):
            running.submit([5] * 20, 4)
        self.assertEqual(len(tokens_of(running, running.submit([5] * 8, 4, request_id="fits"))), 4)

    def test_max_tokens_must_be_a_number_that_is_not_negative(self) -> None:
        for bad in (-1, 1.5, "4"):
            self.refused("max_tokens", [1, 5], bad)

    def test_duplicate_id_while_live_and_afterwards(self) -> None:
        running = engine()
        running.submit([1, 5], 2, request_id="a")
        for _ in range(2):
            with self.assertRaises(ValueError) as caught:
                running.submit([1, 6], 2, request_id="a")
            self.assertIn("a", str(caught.exception))
            running.run()

    def test_a_prompt_that_fills_the_context_but_one(self) -> None:
        running = engine()
        name = running.submit([5] * 95, 4)
        events = list(running.stream(name))
        self.assertEqual(sum(e.kind == EventKind.TOKEN for e in events), 1)
        self.assertEqual(finish_reason(events), "length")

    def test_no_tokens_asked_for(self) -> None:
        running = engine()
        events = list(running.stream(running.submit([1, 5, 6], 0)))
        self.assertEqual([e.kind for e in events], [EventKind.CHOICE_END, EventKind.REQUEST_END])
        self.assertEqual(finish_reason(events), "length")
        assert_idle(self, running)

    def test_a_single_prompt_token(self) -> None:
        running = engine()
        self.assertEqual(tokens_of(running, running.submit([1], 5)), fixture().golden["single"]["token_ids"])

    def test_unknown_ids(self) -> None:
        running = engine()
        for call in (running.stream, running.cancel, running.snapshot):
            with self.assertRaises(ValueError):
                call("nobody")

    def test_ids_are_made_when_none_is_given(self) -> None:
        running = engine()
        running.submit([1, 5], 1, request_id="req-1")
        names = {running.submit([1, 5 + i], 1) for i in range(3)}
        self.assertEqual(len(names | {"req-1"}), 4)


class Streams(unittest.TestCase):
    def test_events_are_delivered_once(self) -> None:
        running = engine()
        name = running.submit([1, 5, 6], 4)
        first = running.stream(name)
        got = [next(first), next(first)]
        rest = list(running.stream(name))
        self.assertEqual([e.index for e in got + rest if e.kind == EventKind.TOKEN], [0, 1, 2, 3])
        self.assertEqual(list(running.stream(name)), [])

    def test_reading_one_stream_serves_all(self) -> None:
        running = engine()
        a, b = running.submit([1, 5, 6], 6), running.submit([1, 9, 7], 6)
        tokens_of(running, a)
        steps = running.metrics()["steps"]
        self.assertEqual(len(tokens_of(running, b)), 6)
        self.assertLessEqual(running.metrics()["steps"] - steps, 1)

    def test_the_last_event_ends_the_request_and_nothing_follows(self) -> None:
        running = engine()
        name = running.submit([1, 5, 6], 3, params=SamplingParams(n=3, temperature=1.0, seed=4))
        events = list(running.stream(name))
        self.assertEqual(events[-1].kind, EventKind.REQUEST_END)
        self.assertEqual(sum(e.kind == EventKind.CHOICE_END for e in events), 3)
        for choice in range(3):
            mine = [e for e in events[:-1] if e.choice == choice]
            self.assertEqual(mine[-1].kind, EventKind.CHOICE_END)


class Cancelling(unittest.TestCase):
    def test_after_cancel_no_token_even_if_it_was_computed(self) -> None:
        for read in range(5):
            running = engine()
            name = running.submit([1, 5, 6, 7, 8], 8)
            other = running.submit([1, 9, 7], 8)
            stream = running.stream(name)
            for _ in range(read):
                next(stream)
            running.step()
            running.cancel(name)
            running.cancel(name)
            rest = list(stream)
            self.assertEqual([e.kind for e in rest], [EventKind.CHOICE_END, EventKind.REQUEST_END])
            self.assertEqual(finish_reason(rest), "cancelled")
            self.assertEqual(len(tokens_of(running, other)), 8)
            running.cancel(name)
            self.assertEqual(running.step(), [])
            assert_idle(self, running)

    def test_cancelling_before_the_first_step(self) -> None:
        running = engine()
        name = running.submit([1, 5], 4)
        running.cancel(name)
        self.assertEqual(finish_reason(list(running.stream(name))), "cancelled")
        assert_idle(self, running)

    def test_cancelling_after_the_end_changes_nothing(self) -> None:
        running = engine()
        name = running.submit([1, 5, 6], 3)
        running.run()
        running.cancel(name)
        events = list(running.stream(name))
        self.assertEqual(sum(e.kind == EventKind.TOKEN for e in events), 3)
        self.assertEqual(finish_reason(events), "length")


class Isolation(unittest.TestCase):
    def test_a_request_reads_only_its_own_or_shared_pages(self) -> None:
        for path in (TINY, TWO_GROUPS):
            running = engine(path, num_pages=60)
            log = running.parts.backend.access_log = []
            self.submit_all(running)
            reads = 0
            while running.core.has_work:
                del log[:]
                owners = {}
                decision_rows = self.step_and_capture(running, owners)
                for request, page, position, kind in log:
                    self.assertIn(page, owners[request], (request, page, position, kind, decision_rows))
                    reads += kind == "read"
                self.assert_writes_are_private(log, owners)
            self.assertGreater(reads, 100)
            assert_idle(self, running)

    def submit_all(self, running: Any) -> None:
        rng = random.Random(3)
        shared = random_prompt(rng, 12)
        for i in range(6):
            running.submit(shared[: rng.randint(1, 12)] + random_prompt(rng, 9), 6, request_id=f"r{i}")

    def step_and_capture(self, running: Any, owners: dict[str, set[int]]) -> Any:
        """One step; ``owners`` gets the pages in each row's page table while the step ran."""
        execute = running.core.executor
        seen: list[Any] = []

        def watched(decision: Any) -> Any:
            for row in decision.rows:
                tables = running.core.kv.page_table((row.request_id, row.choice))
                owners.setdefault(row.request_id, set()).update(p for table in tables for p in table if p >= 0)
            seen.append([(row.request_id, row.start, row.num_scheduled_tokens) for row in decision.rows])
            return execute(decision)

        running.core.executor = watched
        try:
            running.step()
        finally:
            running.core.executor = execute
        return seen

    def assert_writes_are_private(self, log: list[Any], owners: dict[str, set[int]]) -> None:
        for request, page, _, kind in log:
            if kind == "write":
                others = [name for name, pages in owners.items() if name != request and page in pages]
                self.assertEqual(others, [], f"{request} writes page {page}, which {others} can see")

    def test_tenants_with_different_salts_share_nothing(self) -> None:
        running = engine()
        prompt = [1, *range(5, 25)]
        plain = list(running.stream(running.submit(prompt, 2)))
        again = list(running.stream(running.submit(prompt, 2)))
        salted = list(running.stream(running.submit(prompt, 2, cache_salt="another tenant")))
        self.assertEqual([events[-1].num_cached_tokens > 0 for events in (plain, again, salted)], [False, True, False])
        tokens = [[e.token_id for e in events if e.kind == EventKind.TOKEN] for events in (plain, again, salted)]
        self.assertEqual(tokens[0], tokens[1])
        self.assertEqual(tokens[0], tokens[2])


class RandomArrivals(unittest.TestCase):
    def test_tokens_do_not_depend_on_arrivals_neighbours_or_memory(self) -> None:
        alone: dict[tuple[int, ...], list[int]] = {}
        baseline = engine(num_pages=64, audit=False)
        for seed in range(4):
            rng = random.Random(seed)
            requests = self.requests(rng)
            for item in requests:
                key = tuple(item["prompt_token_ids"])
                if key not in alone:
                    alone[key] = tokens_of(baseline, baseline.submit(key, 24))
            page_size = rng.choice((1, 2, 4, 8))
            running = engine(page_size=page_size, num_pages=rng.randint(76, 120) // page_size)
            outcomes = run_scenario(running, requests)
            for item in requests:
                outcome = outcomes[item["id"]]
                expected = alone[tuple(item["prompt_token_ids"])][: item["max_tokens"]]
                if outcome.finish_reason == "cancelled":
                    expected = expected[: len(outcome.token_ids)]
                self.assertEqual(outcome.token_ids, expected, (seed, item))
            assert_idle(self, running)

    def requests(self, rng: random.Random) -> list[dict[str, Any]]:
        """Many short requests, a few long ones (the tail), some that give up."""
        items = []
        for i in range(10):
            tail = rng.random() < 0.2
            item = {
                "id": f"r{i}",
                "arrival_step": rng.randint(0, 12),
                "prompt_token_ids": [1, *random_prompt(rng, 30 if tail else 8)],
                "max_tokens": rng.randint(16, 24) if tail else rng.randint(0, 5),
            }
            if rng.random() < 0.25:
                item["cancel_after_tokens"] = rng.randint(0, 3)
            items.append(item)
        return items


class Faults(unittest.TestCase):
    def test_an_error_inside_the_model_hits_only_its_request(self) -> None:
        running = engine()
        execute = running.core.executor

        def failing(decision: Any) -> Any:
            if any(row.request_id == "bad" and row.start >= 4 for row in decision.rows):
                raise ZeroDivisionError("injected")
            return execute(decision)

        running.core.executor = failing
        names = [running.submit(item["prompt_token_ids"], item["max_tokens"], request_id=item["id"])
                 for item in fixture().scenario["requests"][:3]]  # fmt: skip
        running.submit([1, 5, 6, 7], 8, request_id="bad")
        for name in names:
            self.assertEqual(tokens_of(running, name), fixture().golden[name]["token_ids"])
        events = list(running.stream("bad"))
        self.assertEqual(finish_reason(events), "error")
        self.assertIn("injected", events[-1].error)
        assert_idle(self, running)

    def test_abnormal_release_is_harmless(self) -> None:
        running = engine()
        name = running.submit([1, 5, 6, 7], 8)
        running.step()
        running.core.kv.release_branch(("nobody", 0))
        running.core.cancel("nobody")
        self.assertEqual(len(tokens_of(running, name)), 8)
        running.core.kv.release_branch((name, 0))
        assert_idle(self, running)

    def test_out_of_pages_says_so(self) -> None:
        running = engine(num_pages=2)
        with self.assertRaises(OutOfPages):
            running.core.kv.allocate("direct", 100)
        assert_idle(self, running)


class Resume(unittest.TestCase):
    def test_a_snapshot_goes_on_elsewhere_with_the_same_tokens(self) -> None:
        expected = fixture().golden["long"]["token_ids"]
        prompt = fixture().scenario["requests"][1]["prompt_token_ids"]
        for read in (0, 1, 7, 23):
            first, second = engine(), engine(page_size=2, num_pages=96)
            stream = first.stream(first.submit(prompt, 24, request_id="moving"))
            got = [next(stream).token_id for _ in range(read)]
            saved = first.snapshot("moving")
            first.cancel("moving")
            self.assertEqual(second.restore(saved), "moving")
            self.assertEqual(got + tokens_of(second, "moving"), expected)


class Measures(unittest.TestCase):
    def test_what_the_text_asks_to_be_recorded(self) -> None:
        running, _ = golden_run(self, TINY)
        metrics = running.metrics()
        for name in ("ttft_s", "tpot_s", "output_tokens_per_s"):
            self.assertGreater(metrics[name], 0.0, name)
        self.assertTrue(0 < metrics["batch_utilization"] <= 1)
        self.assertTrue(0 <= metrics["page_internal_fragmentation"] < 1)
        page_bytes = running.core.kv.page_bytes
        self.assertEqual(metrics["kv_peak_bytes"] % page_bytes, 0)
        self.assertTrue(0 < metrics["kv_peak_bytes"] <= running.core.kv.allocator.num_pages * page_bytes)
        self.assertGreater(metrics["cache"]["hit_tokens"], 0)
        self.assertEqual(metrics["cache"]["pages_taken"], metrics["cache"]["pages_freed"] + metrics["pages"]["cached"])

    def test_times_come_from_the_clock_that_is_given(self) -> None:
        ticks = iter(range(10**6))
        running = engine(clock=lambda: float(next(ticks)))
        name = running.submit([1, 5], 3)
        running.run()
        times = running.core.metrics.requests[name]
        self.assertEqual((times.num_output_tokens, times.num_prompt_tokens), (3, 2))
        self.assertGreater(times.ttft, 0)
        self.assertEqual(times.tpot, (times.last_token - times.first_token) / 2)

    def test_the_timeline_names_the_active_requests_of_each_step(self) -> None:
        running, outcomes = golden_run(self, TINY)
        timeline = running.timeline()
        self.assertEqual(len(timeline), running.metrics()["steps"])
        for name, outcome in outcomes.items():
            active = sum(name in step["active"] for step in timeline)
            self.assertGreaterEqual(active, len(outcome.token_ids))
        produced = sum(step["output_tokens"] for step in timeline)
        self.assertEqual(produced, sum(len(o.token_ids) for o in outcomes.values()))


if __name__ == "__main__":
    unittest.main()

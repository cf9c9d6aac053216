"""The correctness contract of the serving text: alignment of logits, monotone counters, copy-on-write, idempotence."""

from __future__ import annotations

import functools
import math
import random
import sys
import unittest
from typing import Any

from contract_support import ROOT, TINY, TWO_GROUPS, assert_idle, engine, fixture, random_prompt

from octavo.core.events import EventKind
from octavo.core.params import SamplingParams

sys.path.insert(0, str(ROOT / "scripts"))
import make_tiny_fixture as oracle

PARAMS = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=3, ignore_eos=True)


@functools.cache
def oracle_logprobs(path: Any, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """log-softmax after ``tokens``, by the independent forward pass."""
    logits = oracle.forward(list(tokens), dict(fixture(path).weights), dict(fixture(path).config))
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return tuple(x - total for x in logits)


def logprobs_of(running: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], list[Any]]:
    """Output tokens, and the logprobs of all tokens from the second on."""
    events = list(running.stream(running.submit(prompt, max_tokens, params=PARAMS)))
    tokens = [event.token_id for event in events if event.kind == EventKind.TOKEN]
    prompt_part = next(event.prompt_logprobs for event in events if event.prompt_logprobs is not None)
    output_part = [event.logprobs for event in events if event.kind == EventKind.TOKEN]
    return tokens, [*prompt_part[1:], *output_part]


class Alignment(unittest.TestCase):
    def test_whole_chunked_and_token_by_token_logits_agree_with_the_oracle(self) -> None:
        for path in (TINY, TWO_GROUPS):
            prompt = fixture(path).scenario["requests"][4]["prompt_token_ids"][:12]
            results = [logprobs_of(engine(path, max_prefill_chunk=chunk), prompt, 4) for chunk in (64, 5, 1)]
            self.assertEqual(results[0], results[1])
            self.assertEqual(results[0], results[2])
            tokens, found = results[0]
            whole = [*prompt, *tokens]
            for position, entry in enumerate(found, 1):
                expected = oracle_logprobs(path, tuple(whole[:position]))
                self.assertEqual(entry.token_id, whole[position])
                self.assertAlmostEqual(entry.logprob, expected[whole[position]], delta=1e-5)
                for token, logprob in entry.top:
                    self.assertAlmostEqual(logprob, expected[token], delta=1e-5)


class Counters(unittest.TestCase):
    def test_counters_never_fall_and_positions_follow_each_other(self) -> None:
        running = engine(num_pages=14, max_prefill_chunk=3)
        names = [running.submit([1, *random_prompt(random.Random(i), 14)], 8) for i in range(5)]
        before: dict[str, tuple[int, int, int]] = {}
        while running.core.has_work:
            running.step()
            for name in names:
                request = running.core.scheduler.get(name)
                if request is None:
                    continue
                branch = request.branches[0]
                now = (branch.num_computed_tokens, branch.num_tokens, branch.num_cached_tokens)
                self.assertTrue(all(a >= b for a, b in zip(now, before.get(name, (0, 0, 0)), strict=True)), name)
                self.assertLessEqual(branch.num_resident_tokens, branch.num_tokens)
                before[name] = now
        self.assertGreater(running.metrics()["preemptions"], 0)

    def test_rows_continue_where_the_last_one_ended(self) -> None:
        running = engine(max_prefill_chunk=3, max_batched_tokens=7)
        execute, ends = running.core.executor, {}

        def watched(decision: Any) -> Any:
            for row in decision.rows:
                self.assertEqual(row.start, ends.get(row.request_id, row.start))
                ends[row.request_id] = row.start + row.num_scheduled_tokens
            return execute(decision)

        running.core.executor = watched
        for i in range(4):
            running.submit([1, *random_prompt(random.Random(i), 12)], 5)
        running.run()

    def test_the_same_seed_gives_the_same_noise_wherever_it_runs(self) -> None:
        params = SamplingParams(temperature=1.0, seed=9)
        runs = []
        for beside in range(3):
            running = engine(max_prefill_chunk=1 + beside)
            for i in range(beside):
                running.submit([1, 30 + i], 6, params=SamplingParams(temperature=1.0, seed=i))
            name = running.submit([1, 5, 6], 8, params=params)
            runs.append([e.token_id for e in running.stream(name) if e.kind == EventKind.TOKEN])
        self.assertEqual(runs[0], runs[1])
        self.assertEqual(runs[0], runs[2])


class SharedPages(unittest.TestCase):
    def test_a_shared_page_is_copied_before_it_is_written(self) -> None:
        """The prompt ends inside a page that three choices then go on in: none changes what another reads."""
        running = engine()
        log = running.parts.backend.access_log = []
        prompt = [1, 12, 9, 16, 16, 19]  # one page and a half
        name = running.submit(prompt, 6)
        first = [e.token_id for e in running.stream(name) if e.kind == EventKind.TOKEN]
        copies = 0
        execute = running.core.executor

        def watched(decision: Any) -> Any:
            nonlocal copies
            copies += len(decision.copies)
            shared = [page for page in range(48) if running.core.kv.allocator.is_shared(page)]
            del log[:]
            result = execute(decision)
            written = {page for _, page, _, kind in log if kind == "write"}
            self.assertFalse(written & set(shared), "a shared page was written")
            self.assertFalse(written & {copy.source for copy in decision.copies})
            return result

        running.core.executor = watched
        for tail in ([], [30], [31], [30, 31]):
            running.submit(prompt + tail, 6)
        again = running.submit(prompt, 6)
        self.assertEqual([e.token_id for e in running.stream(again) if e.kind == EventKind.TOKEN], first)
        running.run()
        self.assertGreater(copies, 0)
        assert_idle(self, running)

    def test_no_page_of_a_step_is_reused_before_the_step_is_over(self) -> None:
        running = engine(num_pages=16)
        execute = running.core.executor

        def watched(decision: Any) -> Any:
            allocator = running.core.kv.allocator
            named = {
                p for row in decision.rows for t in running.core.kv.page_table((row.request_id, row.choice)) for p in t
            }
            free_before = set(allocator._free)
            self.assertFalse(named & free_before)
            running.core.cancel(decision.rows[0].request_id)
            result = execute(decision)
            self.assertEqual(set(allocator._free), free_before, "pages changed hands while a step was running")
            return result

        running.core.executor = watched
        for i in range(4):
            running.submit([1, *random_prompt(random.Random(i), 10)], 6)
        running.run()
        assert_idle(self, running)


class Idempotence(unittest.TestCase):
    def test_finish_cancel_and_release_may_be_repeated(self) -> None:
        running = engine()
        name = running.submit([1, 5, 6], 4)
        for _ in range(3):
            running.cancel(name)
        events = list(running.stream(name))
        self.assertEqual(sum(e.kind == EventKind.REQUEST_END for e in events), 1)
        for _ in range(2):
            running.cancel(name)
            running.core.kv.release_branch((name, 0))
            running.core.kv.finish((name, 0), [1, 5, 6], 3, 0.0)
            self.assertEqual(running.step(), [])
        assert_idle(self, running)

    def test_a_decision_executed_twice_writes_the_same(self) -> None:
        running = engine()
        execute = running.core.executor

        def twice(decision: Any) -> Any:
            first = execute(decision)
            again = execute(decision)
            self.assertEqual(first, again)
            return again

        running.core.executor = twice
        item = fixture().scenario["requests"][1]
        name = running.submit(item["prompt_token_ids"], item["max_tokens"])
        tokens = [e.token_id for e in running.stream(name) if e.kind == EventKind.TOKEN]
        self.assertEqual(tokens, fixture().golden["long"]["token_ids"])


class CacheKeys(unittest.TestCase):
    def test_every_part_of_the_key_changes_the_namespace(self) -> None:
        from octavo.engine.identity import namespace, numerics_id

        base = {"model": "m", "tokenizer": "t", "numerics": "n", "groups": ["g"], "adapter": "", "salt": ""}
        names = {namespace(**base)}
        for key in base:
            names.add(namespace(**{**base, key: ["other"] if key == "groups" else "other"}))
        self.assertEqual(len(names), 1 + len(base))
        numbers = {"weight_format": "fp32", "kv_dtype": "fp32", "ropes": [1.0]}
        ids = {numerics_id("reference", **numbers), numerics_id("numpy", **numbers)}
        for key in numbers:
            ids.add(numerics_id("reference", **{**numbers, key: [2.0] if key == "ropes" else "other"}))
        self.assertEqual(len(ids), 5)

    def test_reuse_needs_the_exact_tokens(self) -> None:
        running = engine()
        prompt = [1, *range(5, 21)]
        list(running.stream(running.submit(prompt, 1)))
        other = [1, *range(5, 9), 50, *range(10, 21)]  # differs inside the second page
        events = list(running.stream(running.submit(other, 1)))
        self.assertLessEqual(events[-1].num_cached_tokens, 5)
        self.assertGreater(events[-1].num_cached_tokens, 0)


class Overload(unittest.TestCase):
    def test_every_outcome_has_a_reason(self) -> None:
        running = engine(num_pages=12)
        for i in range(12):
            running.submit([1, *random_prompt(random.Random(i), 20)], 10)
        running.run()
        self.assertEqual(sum(running.metrics()["finished"].values()), 12)
        self.assertTrue(set(running.metrics()["finished"]) <= {"stop", "length"})
        assert_idle(self, running)


if __name__ == "__main__":
    unittest.main()

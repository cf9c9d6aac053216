"""The request lifecycle of the runtime text: its snippets with their assertions, against Octavo's names."""

from __future__ import annotations

import unittest

from octavo.core.request import ALLOWED, TERMINAL, Request, apply_transition
from octavo.core.request import RequestState as State
from octavo.core.scheduler import build_batch


class TransitionFunction(unittest.TestCase):
    def test_the_text_s_own_assertions(self) -> None:
        state, blocks = apply_transition("waiting", "admitted", 0)
        state, blocks = apply_transition(state, "prefilling", 2)
        self.assertEqual((state, blocks), ("prefilling", 2))
        state, blocks = apply_transition(state, "cancelled", blocks)
        self.assertEqual((state, blocks), ("cancelled", 0))
        self.assertNotIn("decoding", ALLOWED.get(state, set()))
        with self.assertRaises(ValueError):
            apply_transition("waiting", "admitted", -1)

    def test_block_counts_must_be_whole_numbers(self) -> None:
        for blocks in (-1, 1.5, "2", None):
            with self.assertRaises(ValueError, msg=repr(blocks)):
                apply_transition("waiting", "admitted", blocks)

    def test_every_edge_of_the_table_and_no_other(self) -> None:
        for state in State:
            for target in State:
                if target in ALLOWED.get(state, frozenset()):
                    kept = 0 if target in TERMINAL or target == State.RECOMPUTE else 3
                    self.assertEqual(apply_transition(state, target, 3), (target, kept))
                else:
                    with self.assertRaises(ValueError):
                        apply_transition(state, target, 3)

    def test_the_text_s_edges_are_kept(self) -> None:
        edges = {
            "waiting": {"admitted", "cancelled", "failed"},
            "admitted": {"prefilling", "cancelled", "failed"},
            "prefilling": {"decoding", "cancelled", "failed"},
            "decoding": {"finished", "cancelled", "failed"},
        }
        preempted = {"recompute", "swapped"}
        for state, targets in edges.items():
            self.assertEqual({t.value for t in ALLOWED[State(state)]} - preempted, targets)
        for state in TERMINAL:
            self.assertFalse(ALLOWED.get(state), "a terminal state cannot be left")

    def test_preempted_requests_come_back_or_end(self) -> None:
        for state in (State.RECOMPUTE, State.SWAPPED):
            self.assertEqual({t.value for t in ALLOWED[state]}, {"admitted", "cancelled", "failed"})
            for running in (State.PREFILLING, State.DECODING):
                self.assertIn(state, ALLOWED[running])


class RequestObject(unittest.TestCase):
    def test_the_text_s_own_assertions(self) -> None:
        r = Request("r0")
        r.transition(State.ADMITTED)
        r.reserve_blocks(2)
        with self.assertRaises(ValueError):
            r.reserve_blocks(0)
        r.transition(State.PREFILLING)
        r.transition(State.DECODING)
        r.computed_tokens = 8
        r.transition(State.FINISHED)
        self.assertEqual((r.kv_blocks, r.computed_tokens), (0, 8))
        with self.assertRaises(ValueError):
            r.transition(State.DECODING)

    def test_only_running_requests_own_blocks(self) -> None:
        waiting = Request("r1")
        with self.assertRaises(ValueError):
            waiting.reserve_blocks(1)
        waiting.transition(State.ADMITTED)
        for count in (-1, 1.5, "1"):
            with self.assertRaises(ValueError):
                waiting.reserve_blocks(count)
        waiting.reserve_blocks(1)
        waiting.transition(State.CANCELLED)
        self.assertEqual(waiting.kv_blocks, 0)
        with self.assertRaises(ValueError):
            waiting.reserve_blocks(1)

    def test_the_minimal_request_carries_what_the_text_lists(self) -> None:
        r = Request("r2", (1, 5), tenant="t", priority=3, deadline=9.0, arrival=1.0, model="m", adapter="a")
        self.assertEqual((r.request_id, r.tenant, r.priority, r.deadline, r.arrival), ("r2", "t", 3, 9.0, 1.0))
        self.assertEqual((r.model, r.adapter, tuple(r.prompt_token_ids)), ("m", "a", (1, 5)))
        branch = r.branches[0]
        self.assertEqual(list(branch.token_ids), [1, 5])
        self.assertEqual(list(branch.output_token_ids), [])
        self.assertIsNone(branch.finish_reason)


class BuildBatch(unittest.TestCase):
    requests = (
        {"id": "d0", "phase": "decode", "prompt_left": 0},
        {"id": "p0", "phase": "prefill", "prompt_left": 6},
        {"id": "d1", "phase": "decode", "prompt_left": 0},
    )

    def test_the_text_s_own_assertions(self) -> None:
        requests = list(self.requests)
        batch = build_batch(requests, token_budget=5, max_sequences=3, prefill_chunk=3)
        self.assertEqual([item[0] for item in batch], ["d0", "d1", "p0"])
        self.assertEqual(sum(item[2] for item in batch), 5)
        self.assertTrue(all(tokens == 1 for _, phase, tokens in batch if phase == "decode"))
        with self.assertRaises(ValueError):
            build_batch([*requests, requests[0]], 5, 4, 3)

    def test_budgets_must_be_positive(self) -> None:
        for budgets in ((0, 3, 3), (5, 0, 3), (5, 3, 0), (-1, 3, 3)):
            with self.assertRaises(ValueError):
                build_batch(list(self.requests), *budgets)

    def test_no_budget_is_exceeded_and_nothing_is_changed(self) -> None:
        requests = [dict(r) for r in self.requests] + [{"id": "w0", "phase": "waiting", "prompt_left": 9}]
        before = [dict(r) for r in requests]
        for tokens in range(1, 14):
            for sequences in range(1, 5):
                for chunk in (1, 2, 5, 20):
                    batch = build_batch(requests, tokens, sequences, chunk)
                    self.assertLessEqual(sum(item[2] for item in batch), tokens)
                    self.assertLessEqual(len(batch), sequences)
                    self.assertEqual(len({item[0] for item in batch}), len(batch))
                    self.assertTrue(all(0 < item[2] <= max(chunk, 1) for item in batch))
        self.assertEqual(requests, before)

    def test_an_empty_round(self) -> None:
        self.assertEqual(build_batch([], 5, 3, 3), [])
        self.assertEqual(build_batch([{"id": "x", "phase": "finished", "prompt_left": 0}], 5, 3, 3), [])


if __name__ == "__main__":
    unittest.main()

"""Sequences of which only some tokens stay: what the papers say, memory that is given back, the same bytes always."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import (
    FIXTURES,
    FORGETFUL,
    Collector,
    Oracle,
    alone,
    assert_idle,
    make_core,
    make_request,
    pages_for,
    run_to_end,
    tiny_parts,
)

from octavo.backends import available_backends
from octavo.backends.numpy_backend import NumpyBackend
from octavo.backends.ops import ForwardBatch
from octavo.core.errors import InvalidInput
from octavo.core.facts import scheduler_facts
from octavo.core.kv_eviction import Voting, parse_eviction
from octavo.core.params import SamplingParams
from octavo.core.replay import Replayer, scheduler_for
from octavo.engine.fixture import load_fixture
from octavo.engine.llm import LLM
from octavo.engine.parts import parts_from_fixture
from octavo.engine.recorder import Recorder, read_epochs

TINY = FIXTURES / "tiny_model.json"
BLOCK = 16
ASKED = f"snapkv:capacity=12,window=5,kernel=3,block={BLOCK}"


def prompt_of(length: int) -> tuple[int, ...]:
    dice = random.Random(length)
    return (1, *(dice.randrange(3, 50) for _ in range(length - 1)))


class Plain(NumpyBackend):
    """One sequence, its keys and values in lists of each layer and kv head: both papers word for word."""

    def __init__(self, kv_heads: int, policy: Voting) -> None:
        self.kv_heads, self.policy = kv_heads, policy
        self.held: dict[int, list[tuple[list[Any], list[Any]]]] = {}  # by layer and head
        self.votes: dict[int, list[Any]] = {}

    def write_kv(self, k: Any, v: Any, batch: ForwardBatch, *, layer: int) -> None:
        heads = self.held.setdefault(layer, [([], []) for _ in range(self.kv_heads)])
        votes = self.votes.setdefault(layer, [np.zeros(0) for _ in range(self.kv_heads)])
        for rows, part in ((k, 0), (v, 1)):
            for row in rows:
                for head, values in enumerate(row.reshape(self.kv_heads, -1)):
                    heads[head][part].append(values.astype(np.float64))
        for head in range(self.kv_heads):
            votes[head] = np.append(votes[head], np.zeros(len(k)))

    def attention(self, q: Any, batch: ForwardBatch, *, layer: int, scale: float, head_dim: int, **rest: Any) -> Any:
        out, group = [], q.shape[1] // head_dim // self.kv_heads
        for t, row in enumerate(q):
            parts = []
            for head, query in enumerate(row.reshape(-1, head_dim).astype(np.float64)):
                keys, values = (np.array(part) for part in self.held[layer][head // group])
                seen = len(keys) - len(q) + t + 1
                weights = np.exp(scale * keys[:seen] @ query)
                weights /= weights.sum()
                parts.append(weights @ values[:seen])
                if t >= len(q) - self.policy.looks:
                    self.votes[layer][head // group][:seen] += weights
            out.append(np.concatenate(parts))
        return np.array(out, np.float32)

    def forget(self) -> None:
        """It is due."""
        for layer, heads in self.held.items():
            for head, (keys, values) in enumerate(heads):
                kept = self.policy.kept(self.votes[layer][head].tolist())
                heads[head] = [keys[at] for at in kept], [values[at] for at in kept]
                self.votes[layer][head] = self.votes[layer][head][list(kept)]


def plainly(prompt: tuple[int, ...], count: int, policy: Voting) -> tuple[list[int], list[float]]:
    """The likeliest tokens, each behind those before it, and their log probabilities."""
    parts = parts_from_fixture(load_fixture(TINY), backend="numpy")
    backend, empty, found, scores = Plain(parts.config.num_kv_heads, policy), (), [], []
    ids, start = list(prompt), 0
    while len(found) < count:
        now = ids[:1] if policy.every else ids
        positions, rows = np.arange(start, start + len(now)), np.array([len(now) - 1])
        batch = ForwardBatch(np.array(now), positions, empty, empty, empty, empty, rows, None)
        logits = parts.model.forward(backend, parts.weights, batch)[0].astype(np.float64)
        start, ids = start + len(now), ids[len(now) :]
        if start % policy.every == 0 if policy.every else not found:
            backend.forget()
        if not ids:
            ids = [int(logits.argmax())]
            found += ids
            scores.append(float(logits.max() - np.logaddexp.reduce(logits)))
    return found, scores


@pytest.mark.parametrize("asked", [ASKED, "h2o:heavy=9,recent=7,block=16", "h2o:heavy=3,recent=1,block=16"])
@pytest.mark.parametrize("backend", available_backends())
def test_what_the_paper_says_of_every_head(backend: str, asked: str) -> None:
    for length in (11, 28, 46, 61):
        policy: Any = parse_eviction(asked)
        expected, scores = plainly(prompt_of(length), 22, policy)
        options = {"page_size": 16, "format": "fp32", "kv_dtype": "fp32", "max_prefill_chunk": 9, "audit": True}
        engine = LLM(str(TINY), backend=backend, kv_eviction=asked, say=lambda line: None, **options)
        params = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True, logprobs=0)
        (output,) = engine.generate([prompt_of(length)], params)
        got = output.outputs[0]
        assert list(got.token_ids) == expected, length
        assert [each.logprob for each in got.logprobs] == pytest.approx(scores, abs=2e-4)


def test_a_prompt_that_fits_loses_nothing_and_a_longer_one_does() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0)
    for length, same in ((27, True), (28, False)):
        answers = [
            LLM(str(TINY), backend="reference", page_size=4, kv_eviction=asked, say=lambda line: None)
            .generate([prompt_of(length)], params)[0]
            .outputs
            for asked in ("", ASKED)
        ]
        assert (answers[0] == answers[1]) is same
        assert answers[0][0].token_ids[0] == answers[1][0].token_ids[0]  # drawn while all is there


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_pages_are_given_back_when_a_prompt_is_complete(page_size: int) -> None:
    """In a pool that has no other page than those that the plan counts."""
    (group,) = tiny_parts("snapkv").model.kv_groups()
    bound = group.most_columns(85, page_size, None)
    core, collector = make_core("snapkv", page_size=page_size, num_pages=bound, max_prefill_chunk=7), Collector()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.submit(make_request("r", prompt_of(66), params, "snapkv"), 0.0)
    held = []
    while core.has_work:
        collector.take(core.step(0.0))
        held.append(core.kv.num_branch_pages(("r", 0)))
    assert len(collector.choices["r", 0].tokens) == 20
    assert max(held) == -(-66 // page_size)
    _, policy = FORGETFUL["snapkv"]
    stays = 66 - policy.dropped(66)
    assert stays < policy.capacity + policy.block and held[-2] == -(-(stays + 18) // page_size)
    assert_idle(core)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_with_h2o_pages_stay_as_few_as_it_keeps(page_size: int) -> None:
    """In a pool that has no other page: any length fits."""
    (group,) = tiny_parts("h2o").model.kv_groups()
    bound = group.most_columns(10**9, page_size, None)
    core, collector = make_core("h2o", page_size=page_size, num_pages=bound, max_prefill_chunk=7), Collector()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    core.submit(make_request("r", prompt_of(60), params, "h2o"), 0.0)
    held = []
    while core.has_work:
        collector.take(core.step(0.0))
        held.append(core.kv.num_branch_pages(("r", 0)))
    assert len(collector.choices["r", 0].tokens) == 30
    _, policy = FORGETFUL["h2o"]
    assert max(held) * page_size <= policy.capacity + 2 * policy.block + page_size
    assert_idle(core)


def test_h2o_refuses_beams_by_name() -> None:
    params = SamplingParams(use_beam_search=True, n=2, max_tokens=5)
    with pytest.raises(InvalidInput, match="snapkv") as caught:
        make_core("h2o").submit(make_request("r", prompt_of(9), params, "h2o"), 0.0)
    assert caught.value.field == "use_beam_search"


@pytest.mark.parametrize("model", ["snapkv", "h2o"])
def test_a_step_that_forgets_is_tried_again_as_if_nothing_had_been(model: str) -> None:
    """It fails after it has run: the prompts are still there."""
    params = SamplingParams(temperature=0.9, max_tokens=8, seed=4, ignore_eos=True, logprobs=1)
    expected = alone(model, prompt_of(40), params)
    core, collector, before = make_core(model, page_size=4), Collector(), []
    for name in ("a", "b"):
        core.submit(make_request(name, prompt_of(40), params, model), 0.0)
    execute = core.executor

    def run(decision: Any) -> Any:
        result = execute(decision)
        if not before and any(row.compaction for row in decision.rows):
            before.extend(row.compaction.sources for row in decision.rows)
            raise OSError("injected")
        return result

    core.executor = run
    while not before:
        collector.take(core.step(0.0))
    assert [core.kv.page_table((name, 0)) for name in "ab"] == [(pages,) for pages in before]
    assert len(before) == 2
    run_to_end(core, collector)
    assert [collector.choices[name, 0] for name in "ab"] == expected * 2
    assert_idle(core)


@pytest.mark.parametrize("model", ["snapkv", "h2o"])
@pytest.mark.parametrize("lies", [0, 2])
def test_right_guesses_do_not_pass_over_a_choice(model: str, lies: int) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=30, seed=4, ignore_eos=True, logprobs=1)
    expected = alone(model, prompt_of(21), params)
    core, collector = make_core(model, page_size=4), Collector()
    core.speculator = oracle = Oracle(lambda request, choice: expected[choice].tokens, 7, lies)  # type: ignore[assignment]
    core.submit(make_request("r", prompt_of(21), params, model), 0.0)
    run_to_end(core, collector)
    assert [collector.choices["r", 0]] == expected and oracle.accepted > 8


def test_nothing_is_shared_and_the_numbers_have_a_name_of_their_own() -> None:
    asked = ("", ASKED, "snapkv:capacity=12,window=5,kernel=3", "snapkv:capacity=12,window=5,block=16")
    made = [LLM(str(TINY), backend="reference", page_size=4, kv_eviction=text, say=lambda line: None) for text in asked]
    assert len({each.loaded.parts.numerics_id for each in made}) == 4
    params = SamplingParams(temperature=0.0, max_tokens=3)
    first, second = (made[1].generate([prompt_of(40)], params)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert (second.num_cached_tokens, made[1].loaded.core.kv.match_length("", prompt_of(40))) == (0, 0)
    assert tiny_parts("llama").namespace() != tiny_parts("snapkv").namespace()


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    """The scheduler alone makes the same decisions: what it forgets is in its facts. So does it under pressure."""
    pages = pages_for("snapkv", 4, 60)
    core, collector = make_core("snapkv", num_pages=pages, max_prefill_chunk=5), Collector()
    core.recorder = Recorder(tmp_path / "run.octl", core.scheduler.timeline, scheduler_facts(core.scheduler), print)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i in range(6):
        core.submit(make_request(f"r{i}", prompt_of(15 + 2 * i), params, "snapkv"), 0.0)
    run_to_end(core, collector)
    assert core.metrics.preemptions > 0
    core.close()
    [epoch], damage = read_epochs(tmp_path / "run.octl")
    replayer = Replayer(scheduler_for(epoch[0]["facts"]))
    assert damage is None and all(replayer.feed(event) for event in epoch[1:]), str(replayer.difference)
    for i in range(6):
        assert [collector.choices[f"r{i}", 0]] == alone("snapkv", prompt_of(15 + 2 * i), params)

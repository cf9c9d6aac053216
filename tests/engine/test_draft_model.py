"""A draft model: drafts out of a second forward pass, over pages of its own, that change no byte and leave nothing."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_harness import FIXTURES, MAX_SEQ_LEN, MODELS, Collector, alone, assert_idle, make_core, make_request
from engine_harness import run_to_end as run
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends import available_backends
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.decoding.speculation import DraftLimits, DraftModelProposer, Speculator
from octavo.decoding.speculation.control import DraftControl
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.fixture import load_fixture
from octavo.engine.loader import load_engine, plan_engine
from octavo.engine.parts import ModelParts, parts_from_fixture
from octavo.engine.recorder import read_epochs
from octavo.engine.replay import replay_epoch
from octavo.engine.stats import engine_stats

PROMPT = (4, 9, 31, 4, 9, 31, 4, 9)
GREEDY = SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True, logprobs=1)
BACKENDS = [name for name in ("reference", "native") if name in available_backends()]
TINY = str(FIXTURES / MODELS["llama"])
DRAFTS = ("itself", "noisy", "windows")  # the last: another architecture, with two KV groups


@functools.cache
def draft_parts(kind: str, backend: str = "reference") -> ModelParts:
    """A draft model: the model itself, with other weights, or another model of the same tokens."""
    fixture = load_fixture(FIXTURES / MODELS["gemma3" if kind == "windows" else "llama"])
    if kind == "noisy":
        fixture = replace(fixture, weights={name: moved(w, random.Random(name)) for name, w in fixture.weights.items()})
    return parts_from_fixture(fixture, backend=backend)


def moved(values: Any, dice: random.Random) -> Any:
    """The values, each a little away."""
    return [moved(v, dice) for v in values] if isinstance(values, list) else values + dice.gauss(0.0, 0.03)


def proposer_of(kind: str, backend: str = "reference", **changes: Any) -> DraftModelProposer:
    """With room for everybody, unless told otherwise."""
    parts = draft_parts(kind, backend)
    given = {"num_pages": 200, "page_size": 16 if backend == "native" else 4, "prefix_cache": True, **changes}
    limits = {"max_batched_tokens": 64, "max_running_requests": 64, "max_seq_len": MAX_SEQ_LEN, "max_prefill_chunk": 64}
    limits |= {name: given.pop(name) for name in list(given) if name in limits}
    return DraftModelProposer(parts.model, parts.backend, parts.weights, limits=DraftLimits(**limits), **given)


def speculate(core: EngineCore, proposer: DraftModelProposer, most: int, control: DraftControl | None = None) -> None:
    """Have the core's drafts made so, and the proposer's pages audited with each step."""
    core.speculator = Speculator(proposer, most, control)
    execute = core.executor

    def audited(decision: Any) -> Any:
        proposer.kv.audit()
        return execute(decision)

    core.executor = audited


def assert_nothing_left(proposer: DraftModelProposer) -> None:
    """Neither a branch, nor a page that is not free or cached, nor a slot in use."""
    proposer.kv.audit()
    usage = proposer.kv.usage()
    assert (usage.num_branches, usage.pages.referenced, usage.pages.ticketed) == (0, 0, 0)
    assert not proposer._branches
    assert sorted(proposer._free_slots) == sorted(proposer._tables._lists)  # all that were ever in use


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_model_as_its_own_draft_yields_all_drafts_and_one_more(backend: str, most: int) -> None:
    """Acceptance 1: after the prompt's step each has k drafts and yields k + 1 tokens."""
    core, collector, proposer = make_core(backend=backend, page_size=16), Collector(), proposer_of("itself", backend)
    speculate(core, proposer, most)
    core.submit(make_request("a", PROMPT, GREEDY), 0.0)
    run(core, collector)
    assert [collector.choices["a", 0]] == alone("llama", PROMPT, GREEDY, backend=backend)
    assert core.speculator.stats.accepted == core.speculator.stats.drafted > 0
    assert core.metrics.num_steps == 1 + math.ceil((31 - 1) / (most + 1))
    assert_idle(core)
    assert_nothing_left(proposer)


SHORT = replace(GREEDY, max_tokens=18)
MIXED = SamplingParams(temperature=0.5, seed=3, max_tokens=14, ignore_eos=True, logprobs=1, n=2, frequency_penalty=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DRAFTS)
def test_the_same_bytes_with_any_draft_model(backend: str, kind: str) -> None:
    asked = {"a": SHORT, "b": MIXED, "c": replace(GREEDY, max_tokens=9)}
    core, collector, proposer = make_core(backend=backend, page_size=16), Collector(), proposer_of(kind, backend)
    speculate(core, proposer, 3)
    for name, params in asked.items():
        core.submit(make_request(name, PROMPT, params), 0.0)
    run(core, collector)
    for name, params in asked.items():
        said = [collector.choices[name, choice] for choice in range(params.num_branches)]
        assert said == alone("llama", PROMPT, params, backend=backend)
    stats = core.speculator.stats
    assert stats.drafted > 0 and (stats.accepted > 0 or kind == "windows")
    assert stats.drafted > stats.accepted or kind == "itself"
    assert_nothing_left(proposer)


def test_all_branches_are_drafted_for_in_one_pass_a_depth() -> None:
    """Whatever there is to be read of the branches, k drafts of each take k passes."""
    proposer, known = proposer_of("noisy"), {("a", 0): [4, 9, 31], ("b", 0): [7] * 9, ("b", 1): [7] * 8 + [4]}
    passes: list[int] = []
    forward = proposer.model.forward
    proposer.model = Counting(proposer.model, lambda batch: passes.append(len(batch.seq_lens)))
    for key in known:
        proposer.open(key, "", 3)
    together = proposer.propose_all([(key, ids, 4) for key, ids in known.items()])
    assert passes == [3, 3, 3, 3] and all(len(drafts) == 4 for drafts in together)
    proposer.model.forward = forward
    for (key, ids), drafts in zip(known.items(), together, strict=True):
        apart = proposer_of("noisy")
        apart.open(key, "", 3)
        assert apart.propose(key, ids, 4) == drafts == greedy_by_hand(ids, 4)


class Counting:
    """A model whose passes are told of."""

    def __init__(self, model: Any, tell: Any) -> None:
        self.model, self.tell = model, tell

    def forward(self, ops: Any, w: Any, batch: Any) -> Any:
        """As the model does."""
        self.tell(batch)
        return self.model.forward(ops, w, batch)


def greedy_by_hand(ids: list[int], count: int) -> list[int]:
    """What the draft model says, by an engine of its own."""
    parts, found = draft_parts("noisy"), list(ids)
    groups = parts.model.kv_groups()
    for _ in range(count):
        pool = parts.backend.allocate_kv(8, 16, groups)
        batch = parts.backend.batch(found, range(len(found)), [len(found)], [[list(range(8))]], pool)
        [logits] = parts.model.forward(parts.backend, parts.weights, batch)
        found.append(max(range(len(logits)), key=logits.__getitem__))
    return found[len(ids) :]


def test_drafts_follow_from_the_tokens_alone_however_they_came() -> None:
    """What was written for drafts that were wrong is never read: drafts are those of a proposer that begins now."""
    proposer, dice, ids = proposer_of("noisy"), random.Random(1), [4, 9, 31]
    proposer.open(("a", 0), "", 3)
    kept = Counter[int]()
    while len(ids) < 54:
        drafts = list(proposer.propose(("a", 0), ids, dice.randint(1, 6)))
        assert drafts == greedy_by_hand(ids, len(drafts))
        right = dice.randint(0, len(drafts))
        kept[right] += 1
        ids += [*drafts[:right], dice.randrange(3, 56)]
        if dice.random() < 0.5:  # steps without drafts: few, and so many that they are read apart
            ids += [dice.randrange(3, 56) for _ in range(dice.choice((1, 2, 3, 34)))]
        proposer.kv.audit()
    assert len(kept) > 2


def test_no_draft_lies_beyond_the_longest_sequence() -> None:
    proposer = proposer_of("noisy", max_seq_len=12)
    proposer.open(("a", 0), "", 3)
    for known, drafts in ((9, 4), (11, 2), (12, 1), (13, 0), (60, 0)):  # the last draft is not read
        assert len(proposer.propose(("a", 0), ([4, 9, 31] * 20)[:known], 8)) == drafts
    assert proposer.kv.usage().pages.referenced <= 3


def test_pages_behind_wrong_drafts_are_given_back() -> None:
    proposer = proposer_of("noisy", prefix_cache=False)
    proposer.open(("a", 0), "", 3)
    ids = [4, 9, 31]
    drafts = proposer.propose(("a", 0), ids, 10)
    assert proposer.kv.usage().pages.referenced == 3  # of 12 tokens
    proposer.propose(("a", 0), [*ids, 55 - drafts[0]], 1)
    assert proposer.kv.usage().pages.referenced == 1  # of 4


def test_a_long_prompt_is_read_before_its_drafts_and_counted_apart() -> None:
    ticks = iter(range(10**6))
    proposer = proposer_of("itself", max_prefill_chunk=20, clock=lambda: float(next(ticks)))
    ids = [random.Random(2).randrange(3, 56) for _ in range(75)]
    proposer.open(("a", 0), "", 75)
    answers = [len(proposer.propose(("a", 0), ids, 2)) for _ in range(4)]
    assert answers == [0, 0, 2, 2]  # 20, 40, and then the last few with the first draft
    assert proposer.catch_up_seconds > 0 and proposer.draft_seconds > 0


def test_prompts_are_found_again_within_a_namespace_only() -> None:
    proposer, ids, read = proposer_of("itself"), [4, 9, 31] * 8, []
    proposer.model = Counting(proposer.model, lambda batch: read.append(len(batch.token_ids)))
    for key, namespace in ((("a", 0), "x"), (("b", 0), "x"), (("c", 0), "y")):
        proposer.open(key, namespace, 24)
        proposer.propose(key, ids, 1)
    assert read[0] == read[2] == 24 and read[1] <= 4
    for key in "abc":
        proposer.drop((key, 0))
    assert_nothing_left(proposer)
    proposer.flush()
    assert proposer.kv.usage().pages.cached == 0


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nothing_leaks_and_no_byte_changes_in_random_runs(dice: random.Random) -> None:
    """Preempted, cancelled, failing steps, too few pages for drafts, restarts: the same bytes, and nothing is left."""
    kind = dice.choice(DRAFTS)
    proposer = proposer_of(
        kind,
        num_pages=dice.choice((2, 6, 14, 60)),
        page_size=dice.choice((1, 4, 16)),
        prefix_cache=dice.random() < 0.5,
        max_prefill_chunk=dice.choice((1, 8, 64)),
        max_batched_tokens=dice.choice((2, 9, 64)),
        max_running_requests=dice.choice((1, 3, 8)),
        max_seq_len=dice.choice((20, MAX_SEQ_LEN)),
    )
    pages = {"num_pages": dice.choice((11, 14, 40)), "prefix_cache": dice.random() < 0.5}
    preemption = dice.choice(("swap", "recompute"))
    core, collector = make_core(**pages, preemption=preemption, max_batched_tokens=12), Collector()
    speculate(core, proposer, dice.randint(1, 5))
    waiting = {f"r{i}": dice.choice((SHORT, MIXED)) for i in range(4)}
    asked, cancelled, left = dict(waiting), set[str](), 3000
    while waiting or core.has_work:
        if waiting and dice.random() < 0.4:
            name = next(iter(waiting))
            core.submit(make_request(name, PROMPT, waiting.pop(name)), 0.0)
        if dice.random() < 0.04 and (live := [n for n in asked if n not in waiting and n not in collector.ended]):
            cancelled.add(live[0])
            core.cancel(live[0])
        if dice.random() < 0.05:
            proposer_before, core.speculator = core.speculator.proposer, Speculator(proposer, 2)
            for key in list(proposer_before._branches):  # as if the engine began anew
                proposer.drop(key)
        collector.take(core.step(0.0))
        left -= 1
        assert left, "no progress"
    for name in set(asked) - cancelled:
        params = asked[name]
        assert [collector.choices[name, i] for i in range(params.num_branches)] == once(params)
    assert_idle(core)
    assert_nothing_left(proposer)


@functools.cache
def once(params: SamplingParams) -> list[Any]:
    """What it comes to alone."""
    return alone("llama", PROMPT, params)


def test_a_branch_without_a_finite_logit_has_no_drafts_and_spoils_nobodys() -> None:
    proposer = proposer_of("itself")
    for key in (("a", 0), ("b", 0)):
        proposer.open(key, "", 3)
    forward = proposer.model.forward
    broken = Counting(proposer.model, lambda batch: None)
    broken.forward = lambda *args: [  # type: ignore[method-assign]
        [math.nan] * len(row) if at == 0 else row for at, row in enumerate(forward(*args))
    ]
    proposer.model = broken
    asks = [(("a", 0), [4, 9, 31], 2), (("b", 0), [4, 9, 7], 2)]
    assert list(map(len, proposer.propose_all(asks))) == [0, 0]
    proposer.model.forward = forward  # type: ignore[method-assign]
    assert list(map(len, proposer.propose_all(asks))) == [0, 2]


def test_it_is_loaded_planned_recorded_and_told(tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(Path(TINY).read_text())
    asked = json.dumps({"model": str(draft), "num_speculative_tokens": 3})
    config = EngineConfig(model=TINY, backend="reference", max_seq_len=64, audit=True, record=str(tmp_path / "r.octl"))
    said: list[str] = []
    without, plan = plan_engine(config, say=said.append), plan_engine(replace(config, speculative_config=asked))
    assert plan.needs.draft_model > plan.needs.weights
    assert plan.draft_kv == plan.kv and plan.num_pages == without.num_pages
    assert plan.total - without.total == plan.needs.draft_model + plan.draft_kv
    assert "draft model" in plan.describe() and "draft" not in without.describe()
    core = load_engine(replace(config, speculative_config=asked), say=said.append).core
    proposer = core.speculator.proposer
    assert isinstance(proposer, DraftModelProposer) and proposer.kv.allocator.num_pages == plan.num_pages
    core.speculator.control, core.clock = None, iter(range(10**6)).__next__
    core.submit(make_request("a", PROMPT, GREEDY), 0.0)
    collector = Collector()
    run(core, collector)
    assert collector.choices["a", 0].tokens == once(GREEDY)[0].tokens
    stats = engine_stats(core)
    assert stats["draft_tokens"] == stats["accepted_draft_tokens"] > 0
    assert stats["draft_seconds/propose"] >= proposer.draft_seconds + stats["draft_seconds/read"] > 0
    core.close()
    draft.unlink()
    [epoch], damage = read_epochs(tmp_path / "r.octl")
    assert damage is None and any(event["kind"] == "drafts" for event in epoch)
    report = replay_epoch(epoch, run_model=True, say=said.append)
    assert report.difference is None and report.num_steps == core.metrics.num_steps and report.num_tokens == 31


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "draft_model"}, "name the draft model"),
        ({"method": "ngram", "model": TINY}, "draft_model"),
        ({"model": 3}, "give a name"),
        ({"model": TINY, "quantization": "w3"}, "w4g32"),
        ({"method": "ngram", "quantization": "bf16"}, "draft_model"),
        ({"model": TINY, "verifier": "residual"}, "ngram"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_is_no_draft_model_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        plan_engine(EngineConfig(model=TINY, backend="reference", speculative_config=json.dumps(config)))


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    fixture = json.loads(Path(TINY).read_text())
    tokens = tmp_path / "tokens.json"
    names = fixture["tokenizer"]["vocab"]
    fixture["tokenizer"]["vocab"] = [*names[:-2], names[-1], names[-2]]
    tokens.write_text(json.dumps(fixture))
    config = EngineConfig(model=TINY, backend="reference", max_seq_len=64)
    with pytest.raises(InvalidInput, match="tokenizer"):
        load_engine(replace(config, speculative_config=json.dumps({"model": str(tokens)})), say=lambda line: None)
    with pytest.raises(InvalidInput, match="name the model"):
        replace(config, speculative="draft_model")


def test_a_draft_model_that_is_none_is_blamed_by_its_own_name() -> None:
    asked = EngineConfig(model=TINY, speculative_config='{"model": "no such model"}')
    with pytest.raises(InvalidInput) as refused:
        plan_engine(asked, say=lambda line: None)
    assert (refused.value.field, refused.value.value) == ("speculative_config.model", "no such model")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("params", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02, "n": 2}], ids=str)
def test_drafts_are_drawn_with_the_noise_of_their_branch(backend: str, params: dict[str, Any]) -> None:
    """So the model as its own draft is always right at any temperature, and a near one more often than a greedy one."""
    asked = SamplingParams(**{"temperature": 1.3, "seed": 7, "max_tokens": 31, "ignore_eos": True, "n": 1, **params})
    core, collector, proposer = make_core(backend=backend, page_size=16), Collector(), proposer_of("itself", backend)
    speculate(core, proposer, 4)
    core.submit(make_request("a", PROMPT, asked), 0.0)
    run(core, collector)
    stats = core.speculator.stats
    assert stats.accepted == stats.drafted > 0
    said = [collector.choices["a", choice].tokens for choice in range(asked.num_branches)]
    assert said == [choice.tokens for choice in alone("llama", PROMPT, asked, backend=backend)]
    assert_nothing_left(proposer)


def accepted_of(draws: bool) -> float:
    """The share of drafts of the noisy model that were right."""
    core, proposer = make_core(page_size=16), proposer_of("noisy")
    if not draws:
        proposer.draws_as = lambda *told: None  # type: ignore[method-assign]
    speculate(core, proposer, 3)
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, n=4)
    core.submit(make_request("a", PROMPT, asked), 0.0)
    run(core, Collector())
    return core.speculator.stats.accepted / core.speculator.stats.drafted


def test_common_noise_makes_a_near_model_right_more_often() -> None:
    assert accepted_of(True) > accepted_of(False) + 0.1

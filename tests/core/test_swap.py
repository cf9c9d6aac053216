"""The host tier: what is evicted comes back with the same bytes, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import PARAMS, Plan, Run, worlds

from octavo.core.errors import CorruptPages, InvalidInput, InvariantBroken
from octavo.core.kv import KVCacheManager
from octavo.core.step_model import StepModel
from octavo.core.undo import UndoLog

STEPS = st.lists(st.integers(1, 60), max_size=8)
ENDLESS = {"ignore_eos": True, "stop_token_ids": []}
REPEATED = st.builds(
    Plan,
    prompt=st.builds(
        lambda token, count, last: [token] * count + [last], st.integers(1, 2), st.integers(1, 11), st.integers(1, 2)
    ),
    params=st.builds(
        lambda params, most: {**params, **ENDLESS, "max_tokens": most}, PARAMS, st.sampled_from([None, None, 2, 6])
    ),
    priority=st.integers(-1, 1),
    arrival=st.integers(0, 40),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
)


class SwapRun(Run):
    """A random run with a host tier. In steps `faults` the model fails; in `bad` a page that it reads back is bad."""

    def __init__(self, world, plans, host_pages, preemption="swap", faults=(), bad=()):
        config = {**world.config, "preemption": preemption}
        super().__init__(replace(world, prefix_cache=True, config=config), plans, host_pages=host_pages)
        self.model.corrupt = lambda d: [c.source for c in d.swap_ins][:1] if d.step in bad else ()
        self.model.fault = lambda d: ValueError("on purpose") if d.step in faults and len(d.rows) > 1 else None

    def check_end(self):
        super().check_end()
        tier = self.scheduler.kv.host
        assert tier.num_held == 0 and not tier.pin_counts()


@settings(max_examples=40)
@given(
    worlds(), st.lists(REPEATED, min_size=3, max_size=9), st.sampled_from([1, 2, 3, 8, 40]),
    st.sampled_from(["swap", "recompute", "auto"]), STEPS, STEPS,
)  # fmt: skip
def test_random_runs_say_the_same(world, plans, host_pages, preemption, faults, bad):
    SwapRun(world, plans, host_pages, preemption, faults, bad).play()


PROMPTS = {f"r{i}": [i, *range(2, 10)] for i in range(4)}


def crowd(host_pages: int, preemption: str = "swap", **config) -> Bench:
    """Four requests of 9 + 20 tokens, all admitted at once into room for one and a half."""
    kv = make_kv(12, 4, host_pages=host_pages)
    bench = Bench(kv, preemption=preemption, max_preemptions=50, max_seq_len=32, **config)
    return bench.submit(*(make_request(name, prompt, max_tokens=20) for name, prompt in PROMPTS.items()))


def check_crowd(bench: Bench) -> None:
    for name, prompt in PROMPTS.items():
        assert bench.tokens(name) == null_tokens(prompt, 20, 7)


def computed(bench: Bench) -> int:
    return sum(decision.num_scheduled_tokens for decision in bench.model.decisions)


def kinds(bench: Bench) -> list[str]:
    return [lost.kind for decision in bench.model.decisions for lost in decision.preemptions]


def test_those_that_lose_their_pages_get_them_back_and_compute_nothing_again():
    bench = crowd(40).run()
    check_crowd(bench)
    assert kinds(bench) and set(kinds(bench)) == {"swap"}
    assert computed(bench) == sum(len(prompt) + 19 for prompt in PROMPTS.values())
    events = list(bench.scheduler.timeline)
    back = [event for event in events if event["kind"] == "swap_in"]
    assert back and all(event["tier"] == "host" and event["pages"] == -(-event["tokens"] // 4) for event in back)
    moved = [event for event in events if event["kind"] == "swap_out"]
    assert sum(len(event["pages"]) for event in moved) == 2 * bench.kv.host.stats.kept
    assert {event["how"] for event in events if event["kind"] == "preempt"} == {"swap"}


@pytest.mark.parametrize("host_pages, preemption", [(0, "swap"), (40, "recompute")])
def test_without_swap_they_compute_again_and_say_the_same(host_pages, preemption):
    bench = crowd(host_pages, preemption).run()
    check_crowd(bench)
    assert kinds(bench) and set(kinds(bench)) == {"recompute"}
    assert computed(bench) > computed(crowd(40).run())
    assert not [event for event in bench.scheduler.timeline if event["kind"] == "swap_in"]


@pytest.mark.parametrize("host_pages", [1, 2, 5])
def test_a_tier_that_is_too_small_keeps_what_it_can(host_pages):
    bench = crowd(host_pages).run()
    check_crowd(bench)
    assert bench.kv.host.stats.pushed_out


def test_a_prefix_that_the_pool_has_lost_comes_back():
    bench = Bench(make_kv(6, 4, host_pages=20))
    prompt = list(range(1, 18))
    bench.submit(make_request("first", prompt, max_tokens=1)).run()
    bench.submit(make_request("other", [50 + token for token in prompt], max_tokens=1)).run()
    assert bench.kv.match_length("", prompt) < 16
    bench.submit(make_request("again", [*prompt, 7], max_tokens=2)).run()
    assert bench.end("again").num_cached_tokens == 17  # the last page was partly filled
    assert bench.tokens("again") == null_tokens([*prompt, 7], 2, 7)


def test_a_failed_step_takes_what_it_was_to_write_along():
    bench = crowd(40)
    failed = []
    bench.model.fault = lambda d: failed.append(d) or OSError("once") if d.swap_outs and not failed else None
    while not failed:
        bench.step()
    tier = bench.kv.host
    assert tier.stats.dropped == len(failed[0].swap_outs) and not tier.pin_counts()
    check_crowd(bench.run())


def test_a_page_that_went_bad_is_computed_again_and_nobody_fails():
    bench = crowd(40)
    seen: list[int] = []

    def corrupt(decision):
        bad = [copy.source for copy in decision.swap_ins][:1] if len(seen) < 3 else []
        seen.extend(bad)
        return bad

    bench.model.corrupt = corrupt
    check_crowd(bench.run())
    assert len(seen) == 3 and bench.kv.host.stats.dropped >= 3
    told = [event for event in bench.scheduler.timeline if event["kind"] == "rollback"]
    assert [event["corrupt"] for event in told] == [[page] for page in seen]


def test_an_error_that_names_pages_which_the_step_does_not_read_has_an_owner():
    bench = Bench(make_kv(host_pages=4)).submit(make_request())
    bench.model.fault = lambda decision: CorruptPages([3], "not mine")
    bench.run()
    assert bench.reason() == "error"


def test_the_cheaper_way_is_taken():
    outcomes = {}
    for seconds in (1.0, 0.001):  # that a page takes to come back
        bench = crowd(40, "auto", host_mb_per_s=1)
        bench.scheduler.observe_swap("host", 100, 100 * seconds)
        bench.scheduler.step_model.coefficients = (0.0, 0.0, 0.0, 0.0, 1e-2, 0.0, 0.0)  # a token takes 10 ms
        bench.scheduler.step_model.num_chunked = 100
        check_crowd(bench.run())
        outcomes[seconds] = set(kinds(bench))
    assert outcomes == {1.0: {"recompute"}, 0.001: {"swap"}}


def test_until_both_costs_are_known_it_restores():
    choice = crowd(40, "auto", host_mb_per_s=1).scheduler.swap_choice
    assert choice.pays(0, 4, 1)
    choice.step_model.num_chunked = 100
    assert not choice.pays(0, 4, 1)
    assert isinstance(choice.step_model, StepModel) and choice.seconds_again(0, 4) == 0.0


def test_what_pages_took_is_learnt_by_tier():
    choice = crowd(40, "auto", host_mb_per_s=1).scheduler.swap_choice
    for _ in range(100):
        choice.observe("host", 10, 0.1)
        choice.observe("disk", 2, 0.4)
    for tier, pages, seconds in (("host", 0, 5.0), ("host", 9, 0.0), ("disk", 9, float("inf")), ("tape", 9, 9.0)):
        choice.observe(tier, pages, seconds)  # these say nothing
    assert choice.seconds_back(0, 10, from_disk=4) == pytest.approx(6 * 0.01 + 4 * 0.2, rel=1e-4)
    choice.step_model.coefficients, choice.step_model.num_chunked = (0.05, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0), 100
    assert choice.seconds_back(7, 0) == pytest.approx(0.05 + 0.01 * 8)  # the step that the last token takes
    chunk = choice.config.max_prefill_chunk
    assert choice.seconds_again(0, 3 * chunk - 1) == pytest.approx(3 * 0.05)


def test_settings_that_cannot_be():
    with pytest.raises(InvalidInput, match="prefix cache on"):
        make_kv(host_pages=3, enable_prefix_cache=False)
    with pytest.raises(InvalidInput, match="one of auto, recompute, swap"):
        Bench(preemption="hope")
    with pytest.raises(InvalidInput, match="positive"):
        make_kv(host_pages=-1)


def begin(kv: KVCacheManager, units, undo: UndoLog, key=("a", 0)):
    return kv.begin(key, "", units, 0.0, undo)


def evicted_prefix(host_pages: int = 8) -> tuple[KVCacheManager, list[int]]:
    """Two and a half pages of 4, published, evicted and swapped out; and the pool free again."""
    kv, undo, units = make_kv(4, 4, host_pages=host_pages), UndoLog(), list(range(10))
    begin(kv, units, undo)
    kv.reserve(("a", 0), 10, undo)
    kv.start_step(1)
    kv.end_step(1)
    kv.finish(("a", 0), units, 10, 0.0)
    kv.prefix.evict(4)
    outs, ins, _ = kv.take_swaps(UndoLog())
    assert len(outs) == 3 and not ins
    kv.start_step(2)
    assert set(kv.host.pin_counts().values()) == {1}
    kv.end_step(2)
    kv.audit()
    return kv, units


def test_what_begin_restores_is_taken_back_by_undo():
    kv, units = evicted_prefix()
    undo = UndoLog()
    hit = begin(kv, [*units, 77], undo)
    assert (hit.num_tokens, hit.restored, hit.restored_pages) == (10, 10, 3)
    assert sum(kv.host.pin_counts().values()) == 3
    kv.audit()
    undo.rollback()
    assert not kv.host.pin_counts() and kv.take_swaps(undo) == ((), (), ())
    assert kv.audit().free == 4


def test_the_last_token_is_computed_even_if_all_are_there():
    kv, units = evicted_prefix()
    hit = begin(kv, units[:8], UndoLog())
    assert (hit.num_tokens, hit.no_write, hit.restored_pages) == (7, False, 2)


def test_swap_ins_that_nobody_takes_are_noticed():
    kv, units = evicted_prefix()
    begin(kv, units, UndoLog())
    with pytest.raises(InvariantBroken, match="not taken"):
        kv.start_step(3)


def test_without_room_to_restore_it_begins_with_what_the_pool_has():
    kv, units = evicted_prefix()
    kv.open_bare(("b", 0))
    kv.reserve(("b", 0), 8, UndoLog())
    hit = begin(kv, units, UndoLog())
    assert (hit.num_tokens, hit.restored) == (0, 0)
    assert not kv.host.pin_counts()
    kv.audit()


def test_a_flush_leaves_nothing():
    kv, units = evicted_prefix()
    kv.flush_prefix_cache()
    assert kv.host.num_held == 0 and begin(kv, units, UndoLog()).num_tokens == 0
    kv.audit()


def test_a_page_that_is_still_to_be_read_is_not_forgotten():
    kv, undo, units = make_kv(4, 4, host_pages=8), UndoLog(), list(range(10))
    forgotten: list[int] = []
    kv.store.forget = forgotten.append
    begin(kv, units, undo)
    kv.reserve(("a", 0), 10, undo)
    kv.finish(("a", 0), units, 10, 0.0)
    kv.prefix.evict(4)
    outs, _, _ = kv.take_swaps(UndoLog())
    assert sorted(copy.source for copy in outs) == [0, 1, 2] and not forgotten


def test_the_audit_holds_plan_and_tier_against_each_other():
    kv, units = evicted_prefix()
    begin(kv, units, UndoLog())
    kv.host.pin(0)
    with pytest.raises(InvariantBroken, match="pinned host pages"):
        kv.audit()
    kv.host.unpin(0)
    kv.swaps._leaving[1] = 5
    with pytest.raises(InvariantBroken, match="two swap-outs"):
        kv.audit()


def test_without_a_tier_there_is_nothing_to_restore_from():
    kv, units = evicted_prefix()
    swaps, kv.swaps = kv.swaps, None
    assert kv.take_swaps(UndoLog()) == ((), (), ())
    kv.lose_host_pages([1])
    kv.swaps = swaps
    assert begin(kv, units, UndoLog()).restored == 9

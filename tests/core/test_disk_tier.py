"""The disk tier: what leaves host memory goes on to disk, comes back from there, and is found after a restart."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from builders import Bench, make_kv, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from null_model import null_tokens
from random_run import Run, worlds
from test_host_tier import SIZE, found, keep_all
from test_swap import PROMPTS, REPEATED, STEPS, begin, check_crowd

from octavo.core.errors import InvalidInput
from octavo.core.facts import kv_of, scheduler_facts
from octavo.core.host_tier import HostTier, SavedColumn
from octavo.core.replay import Replayer, scheduler_for
from octavo.core.timeline import plain
from octavo.core.undo import UndoLog


class DiskRun(Run):
    """A random run with two tiers. In steps `faults` the model fails, in `bad` pages that it reads back are bad, and
    after steps `lost` the first page that went to disk turns out not to be there."""

    def __init__(self, world, plans, host_pages, disk_pages, faults=(), bad=(), lost=(), flushed=()):
        config = {**world.config, "preemption": "swap"}
        pool = {"host_pages": host_pages, "disk_pages": disk_pages}
        super().__init__(replace(world, prefix_cache=True, config=config), plans, **pool)
        self.model.corrupt = lambda d: [c.source for c in d.swap_ins][:2] if d.step in bad else ()
        self.model.fault = lambda d: self._happens(d, faults, lost, flushed)

    def _happens(self, decision, faults, lost, flushed):
        if decision.step in flushed:
            self.scheduler.flush_cache()
        if decision.step in lost and decision.sinks:
            page = decision.sinks[0].target
            self.model.host[page] = [None] * self.world.page_size
            self.scheduler.lose_pages([page])
        return ValueError("on purpose") if decision.step in faults and len(decision.rows) > 1 else None

    def check_end(self):
        super().check_end()
        tier = self.scheduler.kv.host
        assert tier.num_held == 0 and not tier.pin_counts() and tier.num_used == (0, 0)


@settings(max_examples=40)
@given(
    worlds(), st.lists(REPEATED, min_size=3, max_size=9), st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 5, 40]), STEPS, STEPS, STEPS, STEPS,
)  # fmt: skip
def test_random_runs_say_the_same(world, plans, host_pages, disk_pages, faults, bad, lost, flushed):
    DiskRun(world, plans, host_pages, disk_pages, faults, bad, lost, flushed).play()


def crowd(host_pages: int = 2, disk_pages: int = 60, columns=(), **config) -> Bench:
    """Four requests of 9 + 20 tokens, all admitted at once into room for one and a half."""
    kv = make_kv(12, 4, host_pages=host_pages, disk_pages=disk_pages, disk_columns=columns)
    bench = Bench(kv, preemption="swap", max_preemptions=50, max_seq_len=32, **config)
    return bench.submit(*(make_request(name, prompt, max_tokens=20) for name, prompt in PROMPTS.items()))


def test_with_little_memory_it_comes_back_from_disk():
    bench = crowd().run()
    check_crowd(bench)
    stats, events = bench.kv.host.stats, list(bench.scheduler.timeline)
    assert stats.sunk and stats.disk_restored and stats.hit_units <= stats.query_units
    assert {event["tier"] for event in events if event["kind"] == "swap_out"} == {"host", "disk"}
    assert "disk" in {event["tier"] for event in events if event["kind"] == "swap_in"}
    computed = sum(decision.num_scheduled_tokens for decision in bench.model.decisions)
    assert computed < sum(d.num_scheduled_tokens for d in crowd(2, 0).run().model.decisions)


def test_what_is_on_disk_is_found_after_a_restart():
    first = crowd().run()
    saved = first.kv.host.saved()
    assert saved and [column.number for column in saved] == sorted(column.number for column in saved)
    again = crowd(columns=saved)
    moved = {2 + page for column in saved for page in column.pages}
    again.model.host = {page: held for page, held in first.model.host.items() if page in moved}
    assert again.kv.host.num_used[1] == sum(len(column.pages) for column in saved)
    again.kv.audit()
    check_crowd(again.run())
    assert again.kv.host.stats.disk_restored
    hits = [event["cached"] for event in again.scheduler.timeline if event["kind"] == "admit" and event["times"] == 1]
    assert max(hits) >= 8  # before anything was preempted


def test_a_saved_tier_is_the_same_after_a_restart_but_for_its_size():
    tier = HostTier(1, SIZE, disk_pages=9)
    for units in ([1, 1, 2, 2, 3], [1, 1, 4, 4], [6, 6]):
        keep_all(tier, units)
    saved = tier.saved()
    other = HostTier(5, SIZE, disk_pages=9)
    other.adopt(saved)
    other.audit()
    assert other.saved() == saved and other.num_used == (0, len([p for c in saved for p in c.pages]))
    assert found(other, [1, 1, 2, 2, 3]) == 5 and found(other, [1, 1, 4, 4]) == 4 and found(other, [6, 6]) == 0
    keep_all(other, [7, 7])
    assert max(column.number for column in saved) < other.match("", [7, 7], 0)[0].number


@pytest.mark.parametrize(
    "columns",
    [
        [SavedColumn(1, 7, 1, "", (1, 1), (0,))],
        [SavedColumn(1, 0, 1, "", (1, 1), (0,)), SavedColumn(2, 0, 2, "", (1, 1), (1,))],
        [SavedColumn(1, 0, 1, "", (1, 1), (0,)), SavedColumn(1, 0, 2, "", (2, 2), (1,))],
        [SavedColumn(1, 0, 1, "", (1, 1), (0,)), SavedColumn(2, 0, 2, "", (2, 2), (0,))],
        [SavedColumn(1, 0, 1, "", (1, 1), (4,))],
        [SavedColumn(1, 0, 1, "", (1, 1), (1, 1))],
        [SavedColumn(0, 0, 1, "", (1, 1), (1,))],
    ],
)  # fmt: skip
def test_what_is_no_saved_tier_is_refused(columns):
    with pytest.raises(InvalidInput, match="columns"):
        HostTier(1, SIZE, disk_pages=4).adopt(columns)


def test_what_is_on_disk_already_is_not_written_again():
    tier, sunk = HostTier(1, SIZE, disk_pages=4), []
    tier.on_sink = lambda page, disk: sunk.append((page, disk))
    keep_all(tier, [1, 1])
    keep_all(tier, [2, 2])
    assert sunk == [(0, 1)]
    assert keep_all(tier, [1, 1]) == [(0,)]  # it comes to memory again, and stays on disk
    keep_all(tier, [2, 2])
    assert sunk == [(0, 1), (0, 2)] and found(tier, [1, 1]) == 2


def test_what_waits_to_be_written_to_memory_does_not_go_to_disk():
    tier = HostTier(1, SIZE, disk_pages=4)
    tier.may_sink = lambda pages: False
    keep_all(tier, [1, 1])
    keep_all(tier, [2, 2])
    assert tier.num_used == (1, 0) and found(tier, [1, 1]) == 0


def test_the_disk_pushes_out_the_least_recently_used_and_ends_before_beginnings():
    tier = HostTier(1, SIZE, disk_pages=3)
    for units in ([1, 1, 2, 2], [5, 5], [6, 6]):
        keep_all(tier, units)
    assert [found(tier, units) for units in ([1, 1, 2, 2], [5, 5], [6, 6])] == [4, 2, 2]
    tier.use(tier.match("", [1, 1, 2, 2], 0))
    keep_all(tier, [7, 7])
    assert [found(tier, units) for units in ([1, 1, 2, 2], [5, 5], [6, 6], [7, 7])] == [4, 0, 2, 2]
    tier.audit()


def test_a_beginning_stays_on_disk_while_something_leads_from_it():
    tier = HostTier(1, SIZE, disk_pages=2)
    keep_all(tier, [1, 1, 2, 2])
    keep_all(tier, [5, 5])
    assert tier.num_used == (1, 2)
    tier.use(tier.match("", [1, 1, 2, 2], 1))  # the pool had the first column
    keep_all(tier, [6, 6])
    assert [found(tier, units) for units in ([1, 1, 2, 2], [5, 5], [6, 6])] == [2, 2, 2]
    tier.audit()


def test_of_two_copies_the_bad_one_is_dropped():
    tier = HostTier(2, SIZE, disk_pages=2)
    for units in ([1, 1], [2, 2], [3, 3], [1, 1]):
        keep_all(tier, units)
    [entry] = tier.match("", [1, 1], 0)
    assert entry.pages and entry.disk
    tier.drop(entry.pages)
    assert not entry.pages and found(tier, [1, 1]) == 2
    tier.drop(entry.disk)
    tier.audit()
    assert found(tier, [1, 1]) == 0


def test_reading_from_disk_that_does_not_pay_leaves_what_memory_has():
    kv = make_kv(8, 4, host_pages=3, disk_pages=20)
    bench = Bench(kv).submit(make_request("a", list(range(1, 22)), max_tokens=1)).run()
    for number in range(2):  # what is to be written to memory yet cannot go on to disk
        kv.prefix.evict(3)
        bench.submit(make_request(f"b{number}", [50 + number], max_tokens=1)).run()
    where = [bool(entry.pages) for entry in kv.host.match("", list(range(1, 22)), 0)]
    assert where == [True, True, True, False, False, False]
    choice = bench.scheduler.swap_choice
    choice.pays = lambda start, end, pages, from_disk: not from_disk
    bench.submit(make_request("again", list(range(1, 22)), max_tokens=1)).run()
    assert bench.end("again").num_cached_tokens == 12 and kv.host.stats.disk_restored == 0
    assert bench.tokens("again") == null_tokens(list(range(1, 22)), 1, 7)


def recorded(bench: Bench) -> list[dict]:
    """Facts and events of a bench, as a recording has them."""
    facts = scheduler_facts(bench.scheduler)
    events = [{"kind": "start", "n": 0, "facts": facts}]
    bench.scheduler.timeline.listen(
        lambda kind, t, values: events.append({"kind": kind, "n": len(events), "t": t, **plain(kind, values)})
    )
    return events


def test_a_recording_with_a_disk_replays():
    saved = crowd().run().kv.host.saved()
    kv = make_kv(12, 4, host_pages=2, disk_pages=60, disk_columns=saved)
    bench = Bench(kv, preemption="auto", host_mb_per_s=1, max_preemptions=50, max_seq_len=32)
    events, bad = recorded(bench), [4]
    bench.model.host = {page: [-7] * 4 for page in range(2, 62)}  # what comes back is told apart below
    bench.model._read = lambda slot, start, end: None
    bench.model.corrupt = lambda d: [c.source for c in d.swap_ins][:1] if bad and bad.pop() else ()
    bench.submit(*(make_request(name, prompt, max_tokens=20) for name, prompt in PROMPTS.items()))
    for step in range(200):
        bench.step()
        if step % 5 == 0:
            bench.scheduler.observe_swap("disk", 3, 0.001 * step)
            bench.scheduler.lose_pages([2 + step % 60])
        if step == 17:
            bench.scheduler.flush_cache()
        if not bench.scheduler.has_work:
            break
    kinds = [kind for kind, _ in groupby(sorted(event["kind"] for event in events))]
    assert {"moved", "lost", "swap_in", "rollback"} <= set(kinds)
    replayer = Replayer(scheduler_for(events[0]["facts"]))
    for event in events[1:]:
        assert replayer.feed(event), str(replayer.difference)
    assert kv_of(events[0]["facts"]).host.saved() == saved
    told, learnt = bench.scheduler.swap_choice, replayer.scheduler.swap_choice
    assert learnt.seconds_back(0, 5, 5) == told.seconds_back(0, 5, 5) > 0.0


def test_settings_that_cannot_be():
    with pytest.raises(InvalidInput, match="host pages as well"):
        make_kv(disk_pages=3)
    with pytest.raises(InvalidInput, match=">= 0"):
        make_kv(host_pages=1, disk_pages=-3)


def test_a_step_that_failed_before_it_moved_anything_leaves_nothing_to_rely_on():
    bench, failed = crowd(), []
    real = bench.scheduler.executor

    def run(decision):
        if decision.sinks and len(decision.rows) > 1 and len(failed) < 3:
            failed.append(decision)
            raise OSError("before anything")
        return real(decision)

    bench.scheduler.executor = run
    check_crowd(bench.run())
    assert failed


def test_what_is_lost_before_it_went_to_disk_does_not_go_there():
    kv, undo, units = make_kv(4, 4, host_pages=1, disk_pages=4), UndoLog(), list(range(8))
    begin(kv, units, undo)
    kv.reserve(("a", 0), 8, undo)
    kv.start_step(1)
    kv.end_step(1)
    kv.finish(("a", 0), units, 8, 0.0)
    kv.prefix.evict(1)
    kv.take_swaps(UndoLog())
    kv.start_step(2)
    kv.end_step(2)
    kv.prefix.evict(1)  # for which the first leaves memory
    kv.lose_host_pages([1])
    outs, _, sinks = kv.take_swaps(UndoLog())
    assert len(outs) == 1 and not sinks
    kv.start_step(3)
    kv.end_step(3)
    kv.audit()


def test_a_page_of_disk_that_does_not_come_back_is_computed_again():
    bench, bad = crowd(), []

    def corrupt(decision):
        pages = [copy.source for copy in decision.swap_ins if copy.source >= 2]
        if len(bad) < 3 and pages:
            bad.append(pages)
            return pages
        return ()

    bench.model.corrupt = corrupt
    check_crowd(bench.run())
    assert len(bad) == 2 and bench.kv.host.stats.dropped >= sum(map(len, bad))


def test_after_a_flush_nothing_is_found_in_any_tier():
    bench = crowd().run()
    bench.submit(make_request("last", [*range(60, 70)], max_tokens=1)).run()
    assert bench.kv.host.saved() and bench.kv.match_length("", [*range(60, 70)])
    bench.scheduler.flush_cache()
    bench.step()
    assert not bench.kv.host.saved() and bench.kv.host.num_used == (0, 0)
    assert bench.kv.match_length("", [*range(60, 70)]) == 0 and bench.kv.allocator.counts().cached == 0

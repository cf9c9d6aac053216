"""The KV cache manager: hits, waiting, copy-on-write, windows, steps in flight, token handles, errors."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import PageCopy, PageTableDelta
from octavo.core.errors import InvalidInput, InvariantBroken, OutOfPages, UseAfterRelease
from octavo.core.kv import KVCacheManager, KVGroup, ListKVStore, make_kv_groups
from octavo.core.pages import PageState
from octavo.core.prefix import TOMBSTONE
from octavo.core.undo import UndoLog

A, B, C = ("a", 0), ("b", 0), ("c", 0)


def begin(kv, key, units, namespace="", undo=None, **options):
    return kv.begin(key, namespace, units, 0.0, UndoLog() if undo is None else undo, **options)


def run(kv, key, units, step=1, *, ends=False, namespace="", **options):
    """Begin a branch and compute all its units in one step; the hit."""
    hit = begin(kv, key, units, namespace, **options)
    kv.reserve(key, len(units), UndoLog())
    kv.take_copies()
    kv.start_step(step)
    (kv.finish if ends else kv.commit)(key, units, len(units), 0.0)
    kv.end_step(step)
    kv.audit()
    return hit


# ---- hits


@pytest.mark.parametrize(
    ("units", "num_tokens", "no_write", "num_copies"),
    [
        ([9, 9], 0, False, 0),
        ([1, 2, 3, 4], 3, True, 0),  # all of it, up to the end of a page
        ([1, 2, 3], 2, True, 0),  # all of it, inside a page
        ([1, 2, 3, 4, 5], 4, True, 0),  # all of it, at the end of the tail
        ([1], 0, True, 0),
        ([1, 2, 3, 4, 9], 4, False, 0),
        ([1, 2, 3, 4, 5, 9], 5, False, 1),  # continues inside the tail
        ([1, 2, 3, 9], 3, False, 1),  # leaves inside a whole page
    ],
)
def test_a_hit_is_the_longest_cached_prefix_and_leaves_one_token(units, num_tokens, no_write, num_copies):
    kv = KVCacheManager(8, 2)
    run(kv, A, [1, 2, 3, 4, 5], ends=True)
    hit = run(kv, B, units)
    assert (hit.num_tokens, hit.no_write, len(hit.copies)) == (num_tokens, no_write, num_copies)


def test_a_shared_last_page_is_copied_before_the_next_token_is_written():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3], ends=True)
    run(kv, B, [1, 2, 3])
    [(cached,)] = kv.page_table(B)
    [delta] = kv.reserve(B, 4, UndoLog())
    [(own,)] = kv.page_table(B)
    assert kv.take_copies() == (PageCopy(cached, own),) and delta == PageTableDelta(0, 0, (own,))
    assert kv.describe(cached).tickets == ("copy",) and kv.describe(cached).state is PageState.CACHED


def test_without_room_for_a_copy_only_whole_pages_are_attached():
    kv = KVCacheManager(4, 2)
    run(kv, A, [1, 2, 3, 4], ends=True)
    run(kv, B, [8, 8, 9, 9])
    undo = UndoLog()
    hit = begin(kv, C, [1, 2, 3, 5], undo=undo)
    assert hit.num_tokens == 2 and hit.copies == () and kv.take_copies() == ()
    kv.audit()
    undo.rollback()
    assert kv.audit().cached == 2


def test_namespaces_and_opting_out_see_nothing():
    kv = KVCacheManager(20, 2)
    run(kv, A, [1, 2, 3, 4], namespace="x", ends=True)
    assert run(kv, B, [1, 2, 3, 4], namespace="y").num_tokens == 0
    assert run(kv, C, [1, 2, 3, 4], namespace="x", use_prefix=False).num_tokens == 0
    assert kv.page_table(C) == ((0, 1),)  # but it joins the cached pages when it commits
    stats = kv.usage().prefix
    assert (stats.queries, stats.hits, stats.misses, stats.query_units, stats.hit_units) == (2, 0, 2, 8, 0)


def test_a_manager_without_prefix_cache_publishes_nothing():
    kv = KVCacheManager(4, 2, enable_prefix_cache=False)
    run(kv, A, [1, 2, 3], ends=True)
    assert kv.audit().free == 4
    assert run(kv, B, [1, 2, 3]).num_tokens == 0
    kv.computing(B, [1, 2, 3, 4], UndoLog())
    assert not begin(kv, C, [1, 2, 3, 4]).wait


def test_the_cache_is_bounded():
    kv = KVCacheManager(20, 1, prefix_cache_max_pages=3)
    run(kv, A, range(5), ends=True)
    run(kv, B, range(10, 12), ends=True)
    assert kv.audit().cached == 3 and begin(kv, C, [10, 11, 0]).num_tokens == 2


def test_branches_that_computed_the_same_share_it_after_commit():
    kv = KVCacheManager(20, 2)
    run(kv, A, [1, 2, 3, 4])
    begin(kv, B, [1, 2, 3, 4], use_prefix=False)
    kv.reserve(B, 4, UndoLog())
    kv.commit(B, [1, 2, 3, 4], 4, 0.0)
    assert kv.page_table(A) == kv.page_table(B) and kv.audit().referenced == 2
    assert PageTableDelta(0, 1, (1,)) in kv.reserve(B, 5, UndoLog())
    assert kv.usage().prefix.duplicate_pages == 2


# ---- waiting for a prefix


def test_a_prefix_that_is_being_computed_is_waited_for():
    kv = KVCacheManager(40, 2)
    undo = UndoLog()
    prompt = [1, 2, 3, 4, 5]
    begin(kv, A, prompt, undo=undo)
    kv.reserve(A, 5, undo)
    kv.computing(A, prompt, undo, num_tokens=4)
    assert begin(kv, B, [*prompt, 6]).wait
    assert not kv.has_branch(B)
    assert not begin(kv, B, [1, 9, 9]).wait  # shares less than a page
    assert not begin(kv, ("d", 0), prompt, may_wait=False).wait
    assert not begin(kv, ("e", 0), prompt, use_prefix=False).wait
    assert not begin(kv, ("f", 0), prompt, namespace="other").wait
    kv.commit(A, prompt, 4, 0.0)
    assert begin(kv, C, [*prompt, 6]).num_tokens == 4


def test_nobody_waits_for_what_was_undone_or_preempted_or_gains_nothing():
    kv = KVCacheManager(40, 1)
    undo = UndoLog()
    begin(kv, A, [1, 2, 3, 4])
    kv.computing(A, [1, 2], UndoLog())
    kv.computing(A, [1, 2, 3], undo)
    assert begin(kv, B, [1, 2, 3, 4]).wait
    undo.rollback()
    assert begin(kv, B, [1, 2]).wait and not begin(kv, B, [1]).wait
    kv.release_branch(A)
    assert not begin(kv, C, [1, 2, 3, 4]).wait


def test_a_hit_inside_a_page_waits_only_for_a_whole_page_more():
    kv = KVCacheManager(40, 2)
    run(kv, A, [1, 2, 3], ends=True)
    begin(kv, B, [1, 2, 3, 4, 5, 6], may_wait=False)
    kv.computing(B, [1, 2, 3, 4, 5, 6], UndoLog(), num_tokens=4)
    assert not begin(kv, C, [1, 2, 3, 4, 5, 6]).wait  # 3 now, 4 later
    kv.computing(B, [1, 2, 3, 4, 5, 6], UndoLog())
    assert begin(kv, ("d", 0), [1, 2, 3, 4, 5, 6, 7]).wait  # 3 now, 6 later


def test_many_requests_with_one_prefix_compute_it_once():
    kv = KVCacheManager(400, 16)
    prefix, computed, waiting = list(range(100)), 0, [(f"r{n}", 0) for n in range(32)]
    for step in range(3):
        started = []
        for key in list(waiting):
            units = [*prefix, 1000 + int(key[0][1:])]
            hit = begin(kv, key, units)
            if not hit.wait:
                kv.reserve(key, len(units), UndoLog())
                kv.computing(key, units, UndoLog())
                computed += len(units) - hit.num_tokens
                waiting.remove(key)
                started.append((key, units))
        kv.take_copies()
        kv.start_step(step)
        for key, units in started:
            kv.commit(key, units, len(units), 0.0)
        kv.end_step(step)
    assert not waiting and computed == 101 + 31 * (101 - 96)
    kv.audit()


# ---- forks


def test_forks_share_pages_until_one_of_them_writes():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3])
    undo = UndoLog()
    kv.fork(A, B, undo)
    assert kv.page_table(A) == kv.page_table(B) == ((0,),)
    assert kv.reserve(B, 3, undo) == (PageTableDelta(0, 0, (0,)),)  # told whole, nothing to write
    kv.reserve(B, 4, undo)
    kv.reserve(A, 4, undo)
    assert kv.take_copies() == (PageCopy(0, 1),)  # the last one keeps the page
    assert kv.page_table(A) == ((0,),) and kv.page_table(B) == ((1,),)
    undo.rollback()
    assert not kv.has_branch(B) and kv.audit().referenced == 1


def test_a_fork_of_a_planned_copy_copies_from_where_that_comes_from():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3], ends=True)
    begin(kv, B, [1, 2, 9])
    kv.fork(B, C)
    kv.reserve(C, 3, UndoLog())
    copies = kv.take_copies()
    assert [copy.source for copy in copies] == [0, 0] and len({copy.target for copy in copies}) == 2


def test_a_copy_into_a_page_that_is_given_up_is_called_off():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3], ends=True)
    begin(kv, B, [1, 2, 9])
    kv.release_branch(B)
    assert kv.take_copies() == () and kv.describe(0).tickets == ()


def test_a_planned_copy_is_undone():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3], ends=True)
    undo = UndoLog()
    begin(kv, B, [1, 2, 9], undo=undo)
    undo.rollback()
    assert kv.take_copies() == () and kv.describe(0).tickets == () and kv.audit().cached == 1


def test_forks_work_without_a_prefix_cache():
    kv = KVCacheManager(8, 4, enable_prefix_cache=False)
    run(kv, A, [1, 2, 3])
    kv.fork(A, B)
    assert kv.num_branch_pages(A) == kv.num_branch_pages(B) == 1 == kv.audit().referenced
    kv.release_branch(A)
    assert kv.num_branch_pages(A) == 0 and kv.audit().referenced == 1


# ---- windows


def test_pages_behind_the_window_go_and_the_runner_is_told():
    groups = (KVGroup((0,)), KVGroup((1,), window=2))
    kv = KVCacheManager(20, 2, groups)
    run(kv, A, list(range(6)))
    whole, windowed = kv.page_table(A)
    assert TOMBSTONE not in whole and windowed[:2] == (TOMBSTONE, TOMBSTONE) and windowed[2] >= 0
    assert PageTableDelta(1, 0, (TOMBSTONE, TOMBSTONE)) in kv.reserve(A, 7, UndoLog())
    assert kv.audit().cached == 2  # the tree still holds them
    assert kv.reserve(A, 7, UndoLog()) == ()
    kv.commit(A, list(range(7)), 7, 0.0)
    assert kv.prefix.evict(2) == 2  # without touching the locked path
    assert [column[1] for column in kv.prefix.nodes()[0].columns[:2]] == [TOMBSTONE] * 2
    kv.commit(A, list(range(8)), 8, 0.0)
    assert [d for d in kv.reserve(A, 8, UndoLog()) if d.group] == [PageTableDelta(1, 2, (TOMBSTONE,))]
    assert begin(kv, B, [0, 1, 2, 9]).num_tokens == 0 and begin(kv, C, [*range(6), 9]).num_tokens == 6
    kv.audit()


def test_pages_that_others_hold_last_only_where_there_is_no_window():
    """The tree does not count: what it alone holds can be evicted."""
    kv = KVCacheManager(30, 1, (KVGroup((0,)), KVGroup((1,), window=4)))
    run(kv, A, list(range(5)))
    assert kv.num_lasting_pages(A) == kv.num_branch_pages(A) == 5 + 4
    kv.allocator.lease([kv.page_table(A)[1][1]], "x", 1.0)
    assert kv.num_lasting_pages(A) == 5 + 3
    kv.allocator.end_lease("x")
    begin(kv, B, [*range(5), 9])
    assert kv.num_lasting_pages(A) == kv.num_lasting_pages(B) == 5
    kv.release_branch(A)
    assert (kv.num_lasting_pages(A), kv.num_lasting_pages(B)) == (0, 5 + 4)


def test_without_prefix_cache_pages_behind_the_window_are_free_at_once_but_sinks_stay():
    kv = KVCacheManager(20, 1, (KVGroup((0,), window=2, sinks=1),), enable_prefix_cache=False)
    run(kv, A, list(range(5)))
    assert kv.page_table(A) == ((0, TOMBSTONE, TOMBSTONE, 3, 4),) and kv.audit().free == 17


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2), st.integers(1, 7), st.booleans())
def test_a_branch_alone_can_always_reach_the_capacity(page_size, window, sinks, chunk, with_global):
    groups = [KVGroup((0,), window=window, sinks=sinks)] + [KVGroup((1,))] * with_global
    kv = KVCacheManager(9, page_size, groups)
    target = min(kv.capacity_tokens(chunk), 60)
    units = list(range(target))
    if target:
        begin(kv, A, units)
    for end in [*range(chunk, target, chunk), target] if target else []:
        kv.reserve(A, end, UndoLog())
        kv.commit(A, units, end, 0.0)
    assert kv.capacity_tokens(chunk) >= kv.capacity_tokens()
    assert kv.num_pages_needed(target, chunk) <= 9
    kv.audit()


def test_capacity_counts_all_groups():
    kv = KVCacheManager(10, 4, (KVGroup((0,)), KVGroup((1,), window=4)))
    assert kv.capacity_tokens() == 20 and kv.num_pages_needed(5) == 4
    assert kv.capacity_tokens(max_chunk=1) == 32 and kv.num_pages_needed(400, max_chunk=1) == 102
    assert KVCacheManager(4, 4, (KVGroup((1,), window=4),)).capacity_tokens(max_chunk=4) == sys.maxsize


# ---- steps


def test_pages_of_a_branch_cancelled_in_flight_are_not_reused_until_the_step_ends():
    kv = KVCacheManager(2, 1)
    begin(kv, A, [1, 2])
    kv.reserve(A, 2, UndoLog())
    kv.start_step(1)
    kv.release_branch(A)
    begin(kv, B, [3])
    assert kv.audit().ticketed == 2 and kv.free_pages() == 0
    with pytest.raises(OutOfPages, match="1 pages wanted; 0 free and 0 evictable of 2"):
        kv.reserve(B, 1, UndoLog())
    kv.end_step(1)
    kv.end_step(1)  # idempotent
    kv.reserve(B, 1, UndoLog())


def test_the_source_of_a_copy_outlives_its_eviction_until_the_step_ends():
    kv = KVCacheManager(3, 2)
    run(kv, A, [1, 2], ends=True)
    hit = begin(kv, B, [1, 9])
    kv.take_copies()
    kv.start_step(1)
    kv.prefix.evict(3)
    assert kv.describe(hit.copies[0].source).state is PageState.TICKETED
    kv.end_step(1)
    assert kv.describe(hit.copies[0].source).state is PageState.FREE


def test_a_rolled_back_copy_on_write_survives_the_eviction_of_its_source():
    kv = KVCacheManager(4, 4)
    run(kv, A, [1, 2, 3], ends=True)
    run(kv, B, [1, 2, 3])
    undo = UndoLog()
    kv.reserve(B, 4, undo)
    kv.take_copies()
    kv.prefix.flush()
    undo.rollback()
    assert kv.page_table(B) == ((0,),)
    kv.audit()
    assert kv.reserve(B, 4, UndoLog()) and kv.take_copies() == ()  # B is the page's only owner now


def test_a_rolled_back_reservation_tells_the_runner_again():
    kv = KVCacheManager(8, 2)
    undo = UndoLog()
    run(kv, A, [1, 2, 3])
    kv.fork(A, C)  # its tables have not been told yet
    told = kv.reserve(C, 4, undo)
    undo.rollback()
    assert set(told) - set(kv.reserve(C, 3, UndoLog())) == {PageTableDelta(0, 1, (2,))}
    assert kv.reserve(C, 3, UndoLog()) == ()


def test_a_rolled_back_fork_of_a_planned_copy_survives_the_preemption_of_its_parent():
    kv = KVCacheManager(8, 4)
    run(kv, A, [1, 2, 3], ends=True)
    undo = UndoLog()
    begin(kv, B, [1, 2, 9], undo=undo)
    kv.fork(B, C, undo)
    kv.reserve(C, 3, undo)
    kv.release_branch(B)
    undo.rollback()
    assert kv.audit().cached == 1 and kv.take_copies() == ()


def test_a_preemption_inside_a_failed_plan_stands():
    kv = KVCacheManager(8, 2)
    run(kv, A, [1, 2, 3], ends=True)
    undo = UndoLog()
    begin(kv, B, [1, 2, 3], undo=undo)
    kv.fork(B, C, undo)
    kv.reserve(B, 4, undo)
    kv.computing(B, [1, 2, 3, 4], undo)
    kv.release_branch(B)
    undo.rollback()
    assert not kv.has_branch(B) and not kv.has_branch(C) and kv.audit().referenced == 0


def test_steps_must_be_started_once_and_with_their_copies_taken():
    kv = KVCacheManager(8, 2)
    run(kv, A, [1, 2], ends=True)
    kv.start_step(7)
    with pytest.raises(InvalidInput, match="step = 7"):
        kv.start_step(7)
    begin(kv, B, [1, 9])
    with pytest.raises(InvariantBroken, match="1 page copies"):
        kv.start_step(8)


def test_a_leased_page_outlives_its_branch_and_is_not_written():
    kv = KVCacheManager(8, 2)
    run(kv, A, [1])
    kv.allocator.lease([0], "transfer", expires_at=5.0)
    kv.reserve(A, 2, UndoLog())
    assert kv.take_copies() == (PageCopy(0, 1),)
    kv.release_branch(A)
    assert kv.audit().referenced == 1
    assert kv.allocator.expire_leases(5.0) == ["transfer"]


# ---- errors


def test_begin_and_fork_refuse_what_they_cannot_do():
    kv = KVCacheManager(8, 2)
    begin(kv, A, [1])
    with pytest.raises(InvalidInput, match="branch_key"):
        begin(kv, A, [1])
    with pytest.raises(InvalidInput, match="units"):
        begin(kv, B, [])
    with pytest.raises(InvalidInput, match="child_key"):
        kv.fork(A, A)
    for call in (lambda: kv.fork(B, C), lambda: kv.reserve(B, 1, UndoLog()), lambda: kv.page_table(B)):
        with pytest.raises(UseAfterRelease, match="has not begun, or was released"):
            call()


def test_commit_and_finish_take_only_what_the_pages_cover():
    kv = KVCacheManager(8, 2)
    run(kv, A, [1, 2, 3])
    for resident in (1, 5):
        with pytest.raises(InvalidInput, match=r"num_resident = .: give a count in \[2, 4\]"):
            kv.commit(A, [1, 2, 3, 4, 5], resident, 0.0)
    with pytest.raises(InvalidInput, match=r"\[0, 3\]"):
        kv.finish(A, [1, 2, 3], 4, 0.0)
    kv.finish(A, [1], 1, 0.0)  # a stop found late: what is published stays, nothing more is
    assert kv.audit().cached == 1


@pytest.mark.parametrize("page_size", [0, -1, True, 2.0])
def test_a_page_needs_slots(page_size):
    with pytest.raises(InvalidInput, match="page_size"):
        KVCacheManager(1, page_size)


def test_groups_must_have_equal_pages():
    for groups in ((), (KVGroup((0,)), KVGroup((1, 2)))):
        with pytest.raises(InvalidInput, match="groups"):
            KVCacheManager(1, 1, groups)


def _broken(change):
    kv = KVCacheManager(8, 2)
    run(kv, A, [1, 2, 3, 4])
    change(kv, kv._branches[A])
    with pytest.raises(InvariantBroken) as broken:
        kv.audit()
    return str(broken.value)


def test_the_audit_notices_every_kind_of_damage():
    assert "differ in length" in _broken(lambda kv, a: a.tables.append([]))
    assert "no pages" in _broken(lambda kv, a: setattr(a, "tables", [[]]) or setattr(a, "cursor", None) or _unlock(kv))
    assert "keeps page 7" in _broken(lambda kv, a: a.tables[0].__setitem__(0, 7))
    assert "page 5 has owners" in _broken(lambda kv, a: a.tables[0].append(5))
    assert "locks" in _broken(lambda kv, a: kv.prefix.lock(kv.prefix.nodes()[0]))
    assert "not in the tree" in _broken(lambda kv, a: kv.prefix._roots.clear())


def _unlock(kv):
    kv.prefix.nodes()[0].locks = 0


# ---- groups


def test_gemma_makes_six_groups_of_three():
    groups = make_kv_groups([512] * 5 + [0] + [512] * 5 + [0] + [512] * 5 + [0], 1, 256, 256, "bf16")
    assert [len(group.layers) for group in groups] == [3] * 6
    assert [group.window for group in groups].count(0) == 1 and groups[-1].layers != (5, 11, 17)
    assert {group.page_bytes(16) for group in groups} == {3 * 512 * 2 * 16}


@given(st.lists(st.sampled_from([0, 4, 8]), min_size=1, max_size=12))
def test_groups_hold_every_layer_once_in_pages_of_equal_bytes(windows):
    groups = make_kv_groups(windows, 2, 3, 4)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert len({group.page_bytes(4) for group in groups}) == 1
    assert sum(group.padded_layers for group in groups) == 0  # groups of one layer always fit


def test_least_padding_means_the_largest_common_size():
    assert len(make_kv_groups([0] * 30)) == 1
    assert len(make_kv_groups([0, 4] * 3)) == 2
    assert KVGroup((0,), padded_layers=2).page_bytes(1) == 3 * 2 * 4


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "rnn"}, {"dtype": "fp8"}, {"layers": ()}, {"num_kv_heads": 0}, {"k_dim": 0}, {"v_dim": -1},
        {"window": -1}, {"sinks": -1}, {"padded_layers": -1},
    ],
)  # fmt: skip
def test_a_group_names_the_field_that_is_wrong(fields):
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        KVGroup(**{"layers": (0,), **fields})
    with pytest.raises(InvalidInput, match="layer_windows"):
        make_kv_groups([])


# ---- one token at a time


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 14))
def test_tokens_read_back_across_pages(page_size, token_count, appended):
    kv = KVCacheManager(60, page_size, (KVGroup((0,)), KVGroup((1,), window=2)))
    handles = [kv.allocate(name, token_count) for name in "xy"]
    for position in range(appended):
        for number, handle in enumerate(handles):
            kv.append(handle, [position, number], [-position])
    for number, handle in enumerate(handles):
        for position in range(appended):
            key, value = kv.read(handle, position)
            assert list(key) == [position, number] and list(value) == [-position]
    assert kv.audit().referenced == 2 * kv.num_pages_needed(max(token_count, appended))
    for handle in handles:
        kv.release(handle)
    assert kv.audit().free == 60 and not kv.store._pages


def test_a_released_handle_is_dead_but_releasing_twice_is_fine():
    kv = KVCacheManager(2, 2)
    handle = kv.allocate("x", 2)
    kv.append(handle, [1.0], [2.0])
    kv.release(handle)
    again = kv.allocate("x", 1)
    kv.release(handle)
    for call in (lambda: kv.read(handle, 0), lambda: kv.append(handle, [1.0], [1.0])):
        with pytest.raises(UseAfterRelease, match="'x' was released"):
            call()
    with pytest.raises(InvalidInput, match="position"):
        kv.read(again, 0)


def test_allocate_refuses_what_it_cannot_do_and_changes_nothing():
    kv = KVCacheManager(2, 2)
    for count in (0, -1, True, 1.5):
        with pytest.raises(InvalidInput, match="token_count"):
            kv.allocate("x", count)
    with pytest.raises(OutOfPages):
        kv.allocate("x", 5)
    assert kv.usage().num_branches == 0
    handle = kv.allocate("x", 4)
    with pytest.raises(InvalidInput, match="request_id"):
        kv.allocate("x", 1)
    for position in range(4):
        kv.append(handle, [position], [position])
    with pytest.raises(OutOfPages):
        kv.append(handle, [4], [4])
    for position in (-1, 4, True, "0"):
        with pytest.raises(InvalidInput, match="position"):
            kv.read(handle, position)
    assert kv.audit().referenced == 2 and list(kv.read(handle, 3)[0]) == [3]


def test_a_handle_of_another_manager_is_refused():
    kv, other = KVCacheManager(4, 2), KVCacheManager(4, 2)
    kv.allocate("x", 1)
    stranger = other.allocate("x", 1)
    with pytest.raises(InvalidInput, match="handle"):
        kv.release(stranger)
    with pytest.raises(UseAfterRelease):
        kv.read(stranger, 0)


def test_the_list_store_forgets_and_copies():
    store = ListKVStore()
    store.write(0, 1, [1], [2])
    store.copy_page(0, 3)
    store.forget(0)
    assert store.read(3, 1) == ((1,), (2,))
    for slot in ((0, 1), (3, 0)):
        with pytest.raises(UseAfterRelease, match="holds no key"):
            store.read(*slot)

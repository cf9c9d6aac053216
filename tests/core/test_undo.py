"""The undo log: last in, first out, all of it, and only since the mark."""

import pytest

from octavo.core.errors import InvariantBroken
from octavo.core.undo import UndoLog


def test_rollback_runs_entries_newest_first_and_once():
    log, done = UndoLog(), []
    for name in "abc":
        log.push(lambda name=name: done.append(name))
    log.rollback()
    log.rollback()
    assert done == ["c", "b", "a"] and log.mark() == 0


def test_rollback_to_a_mark_keeps_what_came_before():
    log, done = UndoLog(), []
    log.push(lambda: done.append("before"))
    mark = log.mark()
    log.push(lambda: done.append("after"))
    log.rollback_to(mark)
    assert done == ["after"] and log.mark() == 1


def test_clear_forgets_without_undoing():
    log, done = UndoLog(), []
    log.push(lambda: done.append("never"))
    log.clear()
    log.rollback()
    assert done == []


def test_a_failing_entry_does_not_keep_the_others_from_running():
    log, done = UndoLog(), []
    log.push(lambda: done.append("first"))
    log.push(lambda: [][0])
    log.push(lambda: {}["x"])
    with pytest.raises(InvariantBroken, match="undo failed: 'x'"):
        log.rollback()
    assert done == ["first"] and log.mark() == 0

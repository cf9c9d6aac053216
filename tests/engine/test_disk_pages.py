"""Pages on disk: what comes back is what was written, or is named as lost, whatever became of the files meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import CorruptPages, InvalidInput
from octavo.core.host_tier import SavedColumn
from octavo.engine import disk_pages
from octavo.engine.disk_index import Unusable, decode_index, encode_index
from octavo.engine.disk_pages import TAIL_BYTES, DiskPages, buffered_pages

QUEUED_PAGES = 32
PAGE, LAYOUT = 48, b"model 1"
NAMES = ("octavo-kv.index", "octavo-kv.lock", "octavo-kv.pages")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., DiskPages]]:
    """Opens the folder, as often as asked, and closes what is left open."""
    opened: list[DiskPages] = []

    def begin(num_pages: int = 8, layout: bytes = LAYOUT, wait_s: float = 5.0) -> DiskPages:
        said: list[str] = []
        disk = DiskPages(str(folder), num_pages, PAGE, layout, wait_s=wait_s, say=said.append)
        disk.said = said  # type: ignore[attr-defined]
        opened.append(disk)
        return disk

    yield begin
    for disk in opened:
        disk.close(())


def content(page: int, version: int = 0) -> bytes:
    return bytes((page * 31 + version * 7 + i) % 256 for i in range(PAGE))


def chain(pages: list[int]) -> list[SavedColumn]:
    """Columns below each other, one for each page."""
    return [SavedColumn(i + 1, i, i + 5, "space", (i, i + 1), (page,)) for i, page in enumerate(pages)]


def fill(disk: DiskPages, pages: list[int]) -> None:
    for page in pages:
        disk.write(page, memoryview(content(page)))
    settle(disk)


def settle(disk: DiskPages) -> None:
    """Wait until all is written."""
    done = threading.Event()
    disk._todo.put(done.set)
    assert done.wait(10)


def leave(disk: DiskPages, pages: list[int]) -> None:
    """Fill, save, and let go."""
    fill(disk, pages)
    disk.close(chain(pages))


def bad_of(disk: DiskPages, pages: list[int]) -> list[int]:
    """Read pages; those that did not come back. What does come back is right."""
    try:
        for page, data in disk.read(pages):
            assert data == content(page)
    except CorruptPages as error:
        return list(error.pages)
    return []


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_what_was_written_comes_back_now_and_after_a_restart(start: Any, folder: Path) -> None:
    disk = start()
    assert disk.found == []
    disk.write(3, memoryview(content(3)))
    assert bad_of(disk, [3]) == []  # perhaps it is still on its way
    leave(disk, [3, 0, 7])
    again = start()
    assert again.found == chain([3, 0, 7]) and bad_of(again, [7, 3, 0]) == [] and again.said == []
    assert (again.failures, again.pages_read) == ({}, 3) and disk.pages_written in (3, 4)  # one may replace another
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(NAMES, 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_only_one_process_has_the_folder(start: Any) -> None:
    disk = start()
    with pytest.raises(InvalidInput, match="another process uses it"):
        start()
    disk.close(())
    start()


def test_a_folder_that_is_not_ours_alone_is_refused(start: Any, folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o755)
    with pytest.raises(InvalidInput, match="mode 0700"):
        start()
    folder.chmod(0o700)
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (folder / "octavo-kv.pages").symlink_to(secret)
    with pytest.raises(InvalidInput, match="cannot be used"):
        start()
    assert secret.read_text() == "mine"
    (folder / "octavo-kv.pages").unlink()
    os.mkfifo(folder / "octavo-kv.pages")
    with pytest.raises(InvalidInput, match="no plain file"):
        start()
    (folder / "octavo-kv.pages").unlink()
    start()


def test_a_path_that_is_no_folder_is_refused(start: Any, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(InvalidInput, match="cannot be used"):
        start()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_loses_no_more_than_it_hits(data: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("kv")
    folder.chmod(0o700)
    open_disk = lambda: DiskPages(str(folder), 8, PAGE, LAYOUT, wait_s=5.0, say=said.append)  # noqa: E731
    said: list[str] = []
    leave(open_disk(), [2, 0, 1])
    name = data.draw(st.sampled_from(["octavo-kv.index", "octavo-kv.pages"]))
    at = data.draw(st.integers(0, (folder / name).stat().st_size - 1))
    flip(folder / name, at, data.draw(st.integers(0, 7)))
    disk = open_disk()
    try:
        if name == "octavo-kv.index":
            assert disk.found == [] and disk.refused in ("corrupt", "foreign", "version") and len(said) == 1
            assert bad_of(disk, [0, 1, 2]) == [0, 1, 2]
        else:
            assert disk.found == chain([2, 0, 1])
            assert bad_of(disk, [2, 0, 1]) == [at // (PAGE + TAIL_BYTES)]
            assert sum(disk.failures.values()) == 1 and disk.failures.keys() <= {"corrupt", "stale"}
    finally:
        disk.close(())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_files_cut_off_anywhere_lose_no_more_than_what_is_gone(data: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("kv")
    folder.chmod(0o700)
    open_disk = lambda: DiskPages(str(folder), 8, PAGE, LAYOUT, wait_s=5.0, say=said.append)  # noqa: E731
    said: list[str] = []
    leave(open_disk(), [0, 1, 2])
    name = data.draw(st.sampled_from(["octavo-kv.index", "octavo-kv.pages"]))
    size = data.draw(st.integers(0, (folder / name).stat().st_size - 1))
    os.truncate(folder / name, size)
    (folder / "octavo-kv.index.new").write_bytes(b"half of an ind")  # a process was killed while it wrote
    disk = open_disk()
    try:
        if name == "octavo-kv.index":
            assert disk.found == [] and disk.refused in ("truncated", "corrupt")
        else:
            whole = size // (PAGE + TAIL_BYTES)
            assert [c.pages for c in disk.found] == [(page,) if page < whole else () for page in range(3)]
            assert bad_of(disk, [0, 1, 2]) == list(range(whole, 3))
            fill(disk, [1])
            assert bad_of(disk, [1]) == []
        assert len(said) == 1
    finally:
        disk.close(())


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda path: path.write_bytes(b"octavo disk kv 999\nwhat comes"), "version"),
        (lambda path: path.write_bytes(b"\x89PNG not ours at all"), "foreign"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable"),
        (lambda path: path.write_bytes(encode_index(b"model 2", chain([1]), {1: b"12345678"})), "layout"),
        (lambda path: path.write_bytes(forged()), "corrupt"),
    ],
)
def test_an_index_that_is_none_of_ours_is_passed_over(start: Any, folder: Path, spoil: Any, reason: str) -> None:
    leave(start(), [1, 2])
    spoil(folder / "octavo-kv.index")
    disk = start()
    assert (disk.found, disk.refused, len(disk.said)) == ([], reason, 1)
    assert bad_of(disk, [1, 2]) == [1, 2] and disk.failures == {"missing": 2}
    assert (folder / "octavo-kv.pages").stat().st_size == 0


def forged() -> bytes:
    """An index whose digest is right and whose columns cannot be."""
    return encode_index(LAYOUT, [SavedColumn(1, 0, 1, "", (1, 1), (1,)), SavedColumn(2, 0, 2, "", (1, 1), (2,))],
                        {1: b"12345678", 2: b"12345678"})  # fmt: skip


def test_another_size_keeps_what_fits(start: Any, folder: Path) -> None:
    leave(start(), [0, 5, 1])
    small = start(num_pages=2)
    assert [column.pages for column in small.found] == [(0,), (), (1,)] and bad_of(small, [0, 1]) == []
    assert (folder / "octavo-kv.pages").stat().st_size == 2 * (PAGE + TAIL_BYTES)


def test_an_older_index_never_speaks_of_newer_bytes(start: Any, folder: Path) -> None:
    leave(start(), [1, 2])
    older = (folder / "octavo-kv.index").read_bytes()
    disk = start()
    disk.write(1, memoryview(content(1, version=1)))
    disk.close(chain([1, 2]))
    (folder / "octavo-kv.index").write_bytes(older)  # as if it had been killed before the second one
    again = start()
    assert bad_of(again, [1, 2]) == [1] and again.failures == {"stale": 1}


def test_an_index_says_nothing_of_what_was_given_away_before_it_was_written(start: Any) -> None:
    disk = start()
    gate = threading.Event()
    disk._todo.put(gate.wait)
    disk.write(1, memoryview(content(1, version=1)))
    disk.save(chain([1]))
    disk.write(1, memoryview(content(1)))  # another column, before the first was written
    gate.set()
    settle(disk)
    disk._files.close()  # killed
    assert [column.pages for column in start().found] in ([], [()])


def failing(code: int, after: int = 0) -> Callable[..., int]:
    """`os.pwrite` that writes so many bytes of each call, and then fails."""
    real = os.pwrite

    def write(descriptor: int, data: Any, offset: int) -> int:
        if after and len(data) > PAGE:  # the first part of a slot
            return real(descriptor, data[:after], offset)
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize("code, reason", [(errno.ENOSPC, "full"), (errno.EIO, "write"), (errno.EDQUOT, "full")])
@pytest.mark.parametrize("after", [0, 20])
def test_a_disk_that_takes_no_more_loses_pages_and_says_so_once(
    start: Any, monkeypatch: Any, code: int, reason: str, after: int
) -> None:
    disk = start()
    fill(disk, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(code, after))
        fill(disk, [1])
        assert disk.take_lost() == [1] and disk.take_lost() == []
        assert bad_of(disk, [0, 1]) == [1] and disk.failures == {"missing": 1}
        fill(disk, [2])  # not even tried
    assert disk.take_lost() == [2] and disk.write_failures == {reason: 1, "paused": 1} and len(disk.said) == 1
    disk._resume_at = 0.0
    fill(disk, [1])
    assert bad_of(disk, [0, 1]) == []


def test_short_writes_go_on_where_they_ended(start: Any, monkeypatch: Any) -> None:
    real, disk = os.pwrite, start()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    leave(disk, [4, 5])
    assert bad_of(start(), [4, 5]) == [] and not disk.write_failures


def test_short_reads_go_on_and_failing_ones_are_named(start: Any, monkeypatch: Any) -> None:
    real, disk = os.pread, start()
    fill(disk, [4, 5])
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 11), offset))
    assert bad_of(disk, [4, 5]) == []

    def broken(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pread", broken)
    assert bad_of(disk, [4, 5]) == [4, 5] and disk.failures == {"unreadable": 2}


def test_an_index_that_cannot_be_written_leaves_the_old_one(start: Any, folder: Path, monkeypatch: Any) -> None:
    leave(start(), [1])
    disk = start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        leave(disk, [1, 2])
    assert disk.write_failures == {"index": 1} and len(disk.said) == 1
    again = start()
    assert [column.number for column in again.found] == [1]
    assert bad_of(again, [1]) == [1]  # it was written again, and that index was lost


def test_a_full_queue_loses_what_comes_then(start: Any) -> None:
    disk = start(num_pages=100)
    gate = threading.Event()
    disk._todo.put(gate.wait)
    disk.queued_pages = QUEUED_PAGES
    for page in range(QUEUED_PAGES + 3):
        disk.write(page, memoryview(content(page)))
    lost = [QUEUED_PAGES, QUEUED_PAGES + 1, QUEUED_PAGES + 2]
    assert disk.take_lost() == lost and disk.write_failures == {"queue": 3}
    assert bad_of(disk, [0, QUEUED_PAGES]) == [QUEUED_PAGES]  # the others are read out of the queue
    gate.set()
    settle(disk)
    assert bad_of(disk, list(range(QUEUED_PAGES))) == []


def test_the_queue_is_bounded_by_bytes() -> None:
    assert buffered_pages(1 << 20) == 64 + 6 and buffered_pages(1 << 30) == 1 + 6


def test_a_disk_that_hangs_is_not_waited_for(start: Any, monkeypatch: Any) -> None:
    real, gate = os.pread, threading.Event()
    disk = start(wait_s=0.05)
    fill(disk, [0, 1, 2])

    def hang(descriptor: int, size: int, offset: int) -> bytes:
        if offset:
            gate.wait(10)
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", hang)
    assert bad_of(disk, [0, 1, 2]) == [1, 2] and disk.failures == {"slow": 2}
    assert bad_of(disk, [0]) == [0]  # somebody hangs in there still
    gate.set()
    reader = disk._reader
    assert reader is not None
    reader.join(10)
    assert bad_of(disk, [0, 1, 2]) == []


def test_closing_does_not_wait_for_a_disk_that_hangs(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_pages, "_CLOSE_WAIT", 0.05)
    disk, gate = start(), threading.Event()
    disk._todo.put(gate.wait)
    disk.close(chain([]))
    with pytest.raises(InvalidInput, match="another process"):
        start()  # it may write yet
    gate.set()
    disk._writer.join(10)
    disk.close(())
    start()


CHILD = """
import sys
from octavo.core.host_tier import SavedColumn
from octavo.engine.disk_pages import DiskPages
sys.path.insert(0, {tests!r})
from test_disk_pages import LAYOUT, PAGE, chain, content
disk = DiskPages({folder!r}, 8, PAGE, LAYOUT, wait_s=5.0, say=print)
print("up", flush=True)
version = 0
while True:
    version += 1
    for page in range(8):
        disk.write(page, memoryview(content(page, 0 if page % 2 else version)))
    disk.save(chain([1, 3, 5, 7]))
"""


def test_a_process_killed_in_the_middle_leaves_nothing_wrong(start: Any, folder: Path) -> None:
    code = CHILD.format(folder=str(folder), tests=str(Path(__file__).parent))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    until = time.monotonic() + 10
    while not (folder / "octavo-kv.index").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    disk = start()
    assert disk.refused is None and {c.pages for c in disk.found} <= {(1,), (3,), (5,), (7,), ()}
    bad_of(disk, [page for column in disk.found for page in column.pages])  # what comes back is right
    leave(disk, [2])
    assert bad_of(start(), [2]) == []


COLUMNS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "ü\ud800"]),
        st.integers(0, 5),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(COLUMNS, st.binary(max_size=9))
def test_an_index_reads_as_it_was_written(drawn: Any, layout: bytes) -> None:
    columns = [
        SavedColumn(i + 1, parent % (i + 1), i * 7, name, tuple(units), (i, 10 + i) if held else ())
        for i, (name, parent, units, held) in enumerate(drawn)
    ]
    stamps = {page: bytes([page]) * 8 for column in columns for page in column.pages}
    data = encode_index(layout, columns, stamps)
    assert decode_index(data, layout, 100) == (columns, stamps)
    with pytest.raises(Unusable, match="layout"):
        decode_index(data, layout + b"!", 100)
    written = {page: stamp for page, stamp in stamps.items() if page != 0}
    assert all(0 not in column.pages for column in decode_index(encode_index(layout, columns, written), layout, 100)[0])


def test_units_that_no_index_can_hold_are_left_out_with_all_below_them() -> None:
    columns = [SavedColumn(1, 0, 1, "", (1 << 70,), (0,)), SavedColumn(2, 1, 2, "", (1,), (1,))]
    assert decode_index(encode_index(b"", columns, {0: b"12345678", 1: b"12345678"}), b"", 9) == ([], {})

"""Runs batches: a few lines at a time, each through its own route, until all are done or their time is over.

validating --> in_progress --> finalizing --> completed | expired | cancelled
     +--> failed     +--> cancelling ---^

Whatever is on disk when the server dies is where the next one goes on (`records.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, TypeVar

from octavo.serve.batches.files import FileStore
from octavo.serve.batches.folder import Folder, told_of_disk
from octavo.serve.batches.inside import Call
from octavo.serve.batches.lines import Line, body_of, read_lines
from octavo.serve.batches.records import OPEN, BatchRecord, Journal, ended
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError
from octavo.serve.keys import Key, Keyring
from octavo.serve.metrics import Metrics

__all__ = ["Desk"]

_Result = TypeVar("_Result")
_AGAIN = (429, 503)  # statuses after which a line is tried again
_LONGEST_PAUSE = 30.0  # seconds
_ENDS = {
    "expired": ("batch_expired", "The time of the batch was over before this request was run."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
}
_log = logging.getLogger(__name__)


class Desk:
    """All batches of a folder. Used from the event loop only; the disk is written to in a thread of its own."""

    def __init__(self, folder: Folder, config: ServeConfig, call: Call, keys: Keyring | None, metrics: Metrics) -> None:
        self.files = FileStore(folder, config.max_batch_bytes, config.max_batch_store, config.max_batch_files)
        self._folder, self._config, self._call, self._keys, self._metrics = folder, config, call, keys, metrics
        self._places = asyncio.Semaphore(config.batch_concurrency)
        self._disk = ThreadPoolExecutor(1, "octavo-batches")
        self._batches = folder.decoded("batches", BatchRecord)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}  # of those that run: set to have one cancelled
        going = [record for record in self._batches.values() if record.status in OPEN]
        self.files.sweep([name for record in going for name in (record.output, record.errors_in)])

    def start(self) -> None:
        """Go on with what is open."""
        for record in self._batches.values():
            if record.status in OPEN:
                self._go(record)

    async def stop(self) -> None:
        """Leave everything as it is on disk."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self._disk.shutdown)
        self._folder.close()

    async def on_disk(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Read or write files, one after the other, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: function(*args))

    # -- what clients ask

    async def add(self, record: BatchRecord) -> None:
        """A new batch; it runs by itself. Raises ``ApiError`` 429 if its owner has too many."""
        own = self.of(record.owner)
        most = self._config.max_batch_files
        if sum(other.status in OPEN for other in own) >= most:
            message = f"{most} of your batches run already: wait for their ends."
            raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})
        self._batches[record.id] = record
        try:
            with told_of_disk():
                await self.on_disk(Journal(self._folder, record).save)
        except ApiError:  # its client is told so, and nobody else will ever hear of it
            del self._batches[record.id]
            raise
        for old in [other for other in own if other.status not in OPEN][most - 1 :]:
            del self._batches[old.id]
            await self.on_disk(Journal(self._folder, old).forget)
        self._go(record)

    def get(self, name: str, owner: str) -> BatchRecord:
        """A batch of an owner. Raises ``ApiError`` 404, also for another's."""
        record = self._batches.get(name)
        if record is None or record.owner != owner:
            raise ApiError(404, "There is no such batch of yours.", code="batch_not_found")
        return record

    def of(self, owner: str) -> list[BatchRecord]:
        """An owner's, the newest first."""
        own = [record for record in self._batches.values() if record.owner == owner]
        return sorted(own, key=lambda record: (record.created_at, record.id), reverse=True)

    def uses(self, name: str) -> bool:
        """Whether a batch that is not over reads this file."""
        return any(record.input_file_id == name and record.status in OPEN for record in self._batches.values())

    async def cancel(self, record: BatchRecord) -> None:
        """Run no more of it; what is answered stays. Raises ``ApiError`` 409 for one that is over."""
        if record.status not in OPEN:
            message = f"The batch is {record.status}: there is nothing to cancel."
            raise ApiError(409, message, code="batch_ended")
        if record.status != "finalizing":
            record.turn("cancelling")
            with told_of_disk():
                await self.on_disk(Journal(self._folder, record).save)
            if record.id in self._stops:
                self._stops[record.id].set()
            elif record.status in OPEN:
                self._go(record)  # it rested

    # -- what becomes of them

    def _go(self, record: BatchRecord) -> None:
        self._stops[record.id] = asyncio.Event()
        if record.status == "cancelling":
            self._stops[record.id].set()
        task = self._tasks[record.id] = asyncio.ensure_future(self._work(record))
        task.add_done_callback(lambda _: self._forget(record.id))
        self._metrics.count("octavo:batches_open")

    def _forget(self, name: str) -> None:
        self._tasks.pop(name, None)
        self._stops.pop(name, None)
        self._metrics.count("octavo:batches_open", by=-1)

    async def _work(self, record: BatchRecord) -> None:
        """From wherever it stands to its end. A fault of ours, or of the disk, leaves it for the next start."""
        journal = Journal(self._folder, record)
        try:
            if record.status != "finalizing":
                await self._answer(record, journal)
            if record.status == "finalizing":
                await self.on_disk(self._finish, record, journal)
                record.turn(record.then)
            self._metrics.count("octavo:batches_total", record.status)
        except OSError as error:
            _log.error("batch %s rests until the next start: %s", record.id, error.strerror)
        except Exception:
            _log.exception("batch %s rests until the next start", record.id)

    async def _answer(self, record: BatchRecord, journal: Journal) -> None:
        """Check its lines, then run those that are not done."""
        lines = await self.on_disk(self._lines, record)
        if record.errors:
            record.turn("failed")
            await self.on_disk(journal.save)
            return
        done = await self.on_disk(journal.done)
        record.total = len(lines)
        if record.status == "validating":
            record.turn("in_progress")
        await self.on_disk(journal.save)
        left = [line for line in lines if line.custom_id not in done]
        record.then = await self._run(record, journal, left)
        if record.then != "completed":
            await self.on_disk(self._give_up, record, journal, lines)
        record.turn("finalizing")
        await self.on_disk(journal.save)

    def _lines(self, record: BatchRecord) -> list[Line]:
        """Its requests; what is wrong with them goes into the record."""
        try:
            source = self.files.get(record.input_file_id, record.owner)
        except ApiError as error:
            record.errors = [{"code": error.code, "message": error.message, "param": "input_file_id", "line": None}]
            return []
        config = self._config
        if self._keys is not None and self._keys.named(record.owner) is None:
            record.errors = [{"code": "no_key", "message": "Its API key is no more.", "param": None, "line": None}]
            return []
        most, longest = config.max_batch_lines, config.max_body_bytes
        if record.total:  # it has been checked, by the limits of that time
            most, longest = record.total, source.bytes
        found = read_lines(self.files.place(source), record.endpoint, most, longest)
        record.errors = found.errors
        return found.lines

    async def _run(self, record: BatchRecord, journal: Journal, left: list[Line]) -> str:
        """Run lines until all are done, the time is over or it is cancelled: what becomes of it."""
        stop = asyncio.ensure_future(self._stops[record.id].wait())
        work = asyncio.ensure_future(self._run_all(record, journal, left))
        try:
            seconds = max(0.0, record.expires_at - time.time())
            await asyncio.wait({stop, work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
                return "completed"
            return "cancelled" if stop.done() else "expired"
        finally:
            for task in (stop, work):
                task.cancel()
            await asyncio.gather(stop, work, return_exceptions=True)

    async def _run_all(self, record: BatchRecord, journal: Journal, left: list[Line]) -> None:
        """A few lines at a time; each takes one of the places that all batches share, in turn."""
        tasks: set[asyncio.Task[None]] = set()
        few = asyncio.Semaphore(self._config.batch_concurrency)
        try:
            for line in left:
                await few.acquire()
                task = asyncio.ensure_future(self._run_one(record, journal, line))
                tasks.add(task)
                task.add_done_callback(lambda _: few.release())
                for ended_task in [task for task in tasks if task.done()]:
                    tasks.discard(ended_task)
                    ended_task.result()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(self, record: BatchRecord, journal: Journal, line: Line) -> None:
        source = self.files.place(self.files.get(record.input_file_id, record.owner))
        body = await self.on_disk(body_of, source, line)
        status, headers, answer = await self._patiently(record, body)
        name = headers.get("x-request-id", "")
        told = ended(line.custom_id, response={"status_code": status, "request_id": name, "body": answer})
        await asyncio.shield(self.on_disk(journal.add, told))
        self._metrics.count("octavo:batch_lines_total", "completed" if status < 300 else "failed")

    async def _patiently(self, record: BatchRecord, body: bytes) -> tuple[int, dict[str, str], Any]:
        """The answer to a request. Where there is no room for it now, it comes again, and has no place meanwhile."""
        while True:
            async with self._places:
                status, headers, answer = await self._call(record.endpoint, body, record.owner, self._key(record))
            if status not in _AGAIN:
                return status, headers, answer
            asked = headers.get("retry-after", "1")
            await asyncio.sleep(min(_LONGEST_PAUSE, float(asked) if asked.isdigit() else 1.0))

    def _key(self, record: BatchRecord) -> Key | None:
        """The key of its owner, where there are keys."""
        return None if self._keys is None else self._keys.named(record.owner)

    def _give_up(self, record: BatchRecord, journal: Journal, lines: list[Line]) -> None:
        """Say of each line that is not done that it will not be."""
        done, (code, message) = journal.done(), _ENDS[record.then]
        for line in lines:
            if line.custom_id not in done:
                journal.add(ended(line.custom_id, code=code, message=message))

    def _finish(self, record: BatchRecord, journal: Journal) -> None:
        """Make its journals files. Each part of it may have been done before a crash."""
        for suffix, name, what in (("out", record.output, "output"), ("err", record.errors_in, "errors")):
            count = record.completed if suffix == "out" else record.failed
            if count:
                self.files.adopt(name, journal.name(suffix), record.owner, f"{record.id}_{what}.jsonl")
        record.output_file_id = record.output if record.completed else None
        record.error_file_id = record.errors_in if record.failed else None
        last = copy(record)  # which nobody sees before it is on disk
        last.turn(record.then)
        Journal(self._folder, last).save()

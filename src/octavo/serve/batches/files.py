"""Files: what clients have uploaded and what their batches have answered, each for its owner alone.

files/file-ID.data   its bytes          files/file-ID.json   what it is: a file is there once this is
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from octavo.serve.batches.folder import Folder, told_of_disk
from octavo.serve.body import TooLarge
from octavo.serve.errors import ApiError

__all__ = ["FileRecord", "FileStore", "Upload", "file_id", "page"]

_MAX_NAME = 255


class FileRecord(msgspec.Struct, kw_only=True):
    """What is known of a file; `object` and `status` are OpenAI's."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def told(self) -> dict[str, Any]:
        """As its owner sees it."""
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name != "owner"}
        return {**found, "object": "file", "status": "processed", "expires_at": None, "status_details": None}


def file_id() -> str:
    """A new name."""
    return f"file-{uuid.uuid4().hex[:24]}"


class Upload:
    """A file that is being written. ``put`` raises ``ApiError`` 413 above the limits."""

    def __init__(self, store: FileStore, record: FileRecord, file: IO[bytes]) -> None:
        self._store, self.record, self._file = store, record, file

    def put(self, data: bytes) -> None:
        """Append."""
        record = self.record
        if record.bytes + len(data) > self._store.max_bytes:
            raise TooLarge(self._store.max_bytes, "--max-batch-bytes")
        self._store.take_room(len(data))
        record.bytes += len(data)
        self._file.write(data)


class FileStore:
    """All files of one folder. ``max_bytes``: of one; ``max_total``: of all; ``max_files``: of one owner."""

    def __init__(self, folder: Folder, max_bytes: int, max_total: int, max_files: int) -> None:
        self.folder = folder
        self.max_bytes, self._max_total, self._max_files = max_bytes, max_total, max_files
        self._files = folder.decoded("files", FileRecord)
        self._total = sum(record.bytes for record in self._files.values())
        self._uploads: Counter[str] = Counter()  # that are being written, by owner

    def sweep(self, reserved: Collection[str]) -> None:
        """Remove what a crash has left half done. ``reserved``: names that a batch is about to use."""
        kept = {*self.folder.records("files"), *reserved}
        for entry in (self.folder.path / "files").iterdir():
            known = entry.suffix in (".json", ".data") and entry.stem in kept
            if not known:
                self.folder.remove(f"files/{entry.name}")

    @contextmanager
    def upload(self, owner: str) -> Iterator[Upload]:
        """A new file of an owner: write it, then `keep` it within the block; otherwise nothing of it stays.

        Raises ``ApiError`` 429 if the owner has too many, and 503 if the disk takes no more.
        """
        if len(self.of(owner)) + self._uploads[owner] >= self._max_files:
            message = f"You have {self._max_files} files already: delete some (--max-batch-files)."
            raise ApiError(429, message, code="too_many_files", headers={"Retry-After": "60"})
        record = FileRecord(id=file_id(), owner=owner, filename="", purpose="", bytes=0, created_at=int(time.time()))
        self._uploads[owner] += 1
        try:
            with told_of_disk(), self.folder.create(self._part(record)) as file:
                yield Upload(self, record, file)
        finally:
            self._uploads[owner] -= 1
            self._uploads += Counter()  # without those that have none
            if record.id not in self._files:
                self._total -= record.bytes
                self.folder.remove(self._part(record))

    def keep(self, upload: Upload, filename: str, purpose: str) -> FileRecord:
        """An upload is whole. Blocks until it is on disk."""
        record = upload.record
        record.filename, record.purpose = shown_name(filename), purpose
        upload._file.flush()
        os.fsync(upload._file.fileno())
        self.folder.move(self._part(record), f"files/{record.id}.data")
        self._publish(record)
        return record

    def adopt(self, name: str, journal: str, owner: str, filename: str) -> None:
        """Make a journal a file with answers, by a name given before. Idempotent: a crash may have cut it short."""
        if self.folder.size(journal) is not None:
            self.folder.move(journal, f"files/{name}.data")
        size = self.folder.size(f"files/{name}.data") or 0
        if name not in self._files:
            self._total += size
            created = int(time.time())
            self._publish(
                FileRecord(
                    id=name, owner=owner, filename=filename, purpose="batch_output", bytes=size, created_at=created
                )
            )

    def _publish(self, record: FileRecord) -> None:
        self.folder.write(f"files/{record.id}.json", msgspec.json.encode(record))
        self._files[record.id] = record

    def take_room(self, size: int) -> None:
        """Count bytes that are about to be written. Raises ``ApiError`` 429."""
        if self._total + size > self._max_total:
            message = "There is no room for more files: delete some, or ask the operator for more (--max-batch-store)."
            raise ApiError(429, message, code="no_room", headers={"Retry-After": "60", "Connection": "close"})
        self._total += size

    def get(self, name: str, owner: str, param: str | None = None) -> FileRecord:
        """A file of an owner. Raises ``ApiError`` 404, also for another's."""
        record = self._files.get(name)
        if record is None or record.owner != owner:
            raise ApiError(404, "There is no such file of yours.", param=param, code="file_not_found")
        return record

    def of(self, owner: str) -> list[FileRecord]:
        """An owner's, the newest first."""
        files = list(self._files.values())  # at one go: another thread adds to them
        own = [record for record in files if record.owner == owner]
        return sorted(own, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete(self, record: FileRecord) -> None:
        """Forget a file. Blocks until that is on disk."""
        if self._files.pop(record.id, None) is None:
            return
        self._total -= record.bytes
        self.folder.remove(f"files/{record.id}.json")
        self.folder.remove(f"files/{record.id}.data")

    def place(self, record: FileRecord) -> Path:
        """Where its bytes are."""
        return self.folder.path / "files" / f"{record.id}.data"

    @staticmethod
    def _part(record: FileRecord) -> str:
        return f"files/{record.id}.part"


def shown_name(name: str) -> str:
    """A client's name of a file, as text: what stands behind its folders, without control characters."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(c for c in last if c.isprintable())[:_MAX_NAME] or "file"


def page(found: list[Any], query: Any, default: int, most: int) -> dict[str, Any]:
    """One page of a list: ``limit`` of those behind ``after``. Raises ``ApiError`` 400."""
    asked = query.get("limit", str(default))
    if not (asked.isascii() and asked.isdigit() and len(asked) < 6 and 1 <= int(asked) <= most):
        raise ApiError(400, f"limit: must be from 1 to {most}.", param="limit")
    after = query.get("after")
    if after is not None:
        places = [index for index, record in enumerate(found) if record.id == after]
        if not places:
            raise ApiError(400, "after: must be the id of one of them.", param="after")
        found = found[places[0] + 1 :]
    shown = found[: int(asked)]
    ends = {"first_id": shown[0].id if shown else None, "last_id": shown[-1].id if shown else None}
    return {"object": "list", "data": [record.told() for record in shown], **ends, "has_more": len(found) > len(shown)}

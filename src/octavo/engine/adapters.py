"""Which adapters are served: names, the content that they stand for, and where it lies.

A name stands for content (a digest), and content lies in a place. Requests and prefixes go by content: a name that
comes to mean something else touches nobody. A place is written again once no request and no step needs what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.backends.adapters import AdapterRoom
from octavo.core.errors import InvalidInput

__all__ = ["AdapterTable", "ReadAdapter", "ServedAdapter"]

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
MAX_PATH = 4096
MAX_LORAS, MAX_RANK = 1024, 512


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter off the disk, as the backend wants it."""

    digest: str
    rank: int
    packed: Any


@dataclass(frozen=True)
class ServedAdapter:
    """What a name stands for."""

    name: str
    path: str
    digest: str
    rank: int


class AdapterTable:
    """At most ``room.places`` adapters at a time. All of it but `read` is for the thread that runs the steps."""

    def __init__(self, places: Any, projections: Mapping[str, tuple[int, ...]], room: AdapterRoom) -> None:
        self.places, self.room = places, room
        self._projections = projections
        self._served: dict[str, ServedAdapter] = {}  # by name
        self._place_of: dict[str, int] = {}  # by digest

    @property
    def served(self) -> Sequence[ServedAdapter]:
        """All names, in the order in which they were loaded."""
        return tuple(self._served.values())

    def read(self, path: str) -> ReadAdapter:
        """The adapter in a folder; as slow as the disk, and for any thread. Raises ``InvalidInput``."""
        from octavo.weights.lora import read_adapter

        check_path(path)
        found = read_adapter(path, self._projections, self.room.rank)
        factors = {name: (each.a, each.b, each.scale) for name, each in found.factors.items()}
        return ReadAdapter(found.digest, found.rank, self.places.pack(factors))

    def add(self, name: str, path: str, read: ReadAdapter, in_use: Collection[str]) -> ServedAdapter:
        """Serve it under a name. Idempotent. ``in_use``: the digests that requests and steps need.

        Raises ``InvalidInput`` for a name that stands for something else, and where all places are taken.
        """
        check_name(name)
        known = self._served.get(name)
        if known is not None and known.digest != read.digest:
            raise InvalidInput("lora_name", name, "this name stands for another adapter; unload that first")
        if read.digest not in self._place_of:
            place = self._free_place(in_use)
            self.places.put(place, read.packed)
            self._place_of[read.digest] = place
        served = self._served[name] = ServedAdapter(name, path, read.digest, read.rank)
        return served

    def remove(self, name: str) -> ServedAdapter:
        """The name stands for nothing from now on. Raises ``InvalidInput`` for one that does not already."""
        if name not in self._served:
            raise InvalidInput("lora_name", name, f"no such adapter is loaded; loaded: {self._names()}")
        return self._served.pop(name)

    def named(self, name: str) -> ServedAdapter:
        """What a name stands for. Raises ``InvalidInput``."""
        if name not in self._served:
            raise InvalidInput("lora", name, f"no such adapter is loaded; loaded: {self._names()}")
        return self._served[name]

    def place_of(self, digest: str) -> int:
        """Where content lies. Raises ``InvalidInput`` for what is not here."""
        if digest not in self._place_of:
            raise InvalidInput("adapter", digest, "no adapter with this content is loaded here; load it, and ask again")
        return self._place_of[digest]

    def _names(self) -> str:
        return ", ".join(self._served) or "none"

    def _free_place(self, in_use: Collection[str]) -> int:
        """A place that nobody needs; what was left in such places is forgotten."""
        needed = {served.digest for served in self._served.values()} | set(in_use)
        for digest in [digest for digest in self._place_of if digest not in needed]:
            self.places.clear(self._place_of.pop(digest))
        free = sorted(set(range(self.room.places)) - set(self._place_of.values()))
        if not free:
            remedy = f"all places are taken ({self._names()}, and what requests still use); unload one"
            raise InvalidInput("max_loras", self.room.places, f"{remedy}, or start with a larger --max-loras")
        return free[0]


def check_path(path: str) -> None:
    """Raises ``InvalidInput`` for what cannot be a folder's name."""
    if not 1 <= len(path) <= MAX_PATH or "\0" in path:
        raise InvalidInput("lora_path", path[:64], f"give a folder's name of 1 to {MAX_PATH} characters")


def check_name(name: str) -> None:
    """Raises ``InvalidInput`` for what cannot be an adapter's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput("lora_name", str(name)[:64], "give 1 to 128 letters, digits or any of . _ : / -")

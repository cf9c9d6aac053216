"""Responses that are kept to be asked for again and gone on with: bounded in number and bytes, apart by tenant."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.serve.errors import ApiError

__all__ = ["ResponseStore", "StoredResponse", "Turn"]

Turn = dict[str, Any]  # role and content, and what tools have to do with


@dataclass
class StoredResponse:
    """One response: the object that clients see, the turns it was made from, and how it is stopped while it runs."""

    tenant: str
    body: dict[str, Any]
    turns: list[Turn]  # without instructions; with the answer, once there is one
    stop: Callable[[], None] | None = None
    num_bytes: int = 0

    @property
    def name(self) -> tuple[str, str]:
        """Whose it is, and its id."""
        return self.tenant, str(self.body["id"])


class ResponseStore:
    """The last responses of all tenants. Any thread may use it.

    The oldest leave first; one that still runs leaves the store alone, and not the engine.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # by tenant and id
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stored: StoredResponse) -> None:
        """Add a response, or note that it has grown."""
        size = len(msgspec.json.encode([stored.body, stored.turns]))
        with self._lock:
            self._drop(stored.name)
            if size > self._most_bytes:
                return  # nobody else's leave for one that does not fit alone
            stored.num_bytes = size
            self._kept[stored.name] = stored
            self.num_bytes += size
            while self._kept and (len(self._kept) > self._most or self.num_bytes > self._most_bytes):
                self._drop(next(iter(self._kept)))

    def get(self, response_id: str, tenant: str, param: str | None = None) -> StoredResponse:
        """A tenant's own response. Raises ``ApiError`` 404."""
        stored = self._kept.get((tenant, response_id))
        if stored is None:
            message = (
                "There is no such response here: it was not stored, is another key's, or has been forgotten since."
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget a tenant's own response, and stop it. Raises ``ApiError`` 404."""
        stored = self.get(response_id, tenant)
        with self._lock:
            self._drop(stored.name)
        if stored.stop is not None:
            stored.stop()

    def holds(self, stored: StoredResponse) -> bool:
        """Whether it is still there."""
        return self._kept.get(stored.name) is stored

    def _drop(self, name: tuple[str, str]) -> None:
        stored = self._kept.pop(name, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes

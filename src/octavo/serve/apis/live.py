"""`GET /v1/live`: what the engine does, a few times a second, while somebody watches."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from octavo.serve.described import described
from octavo.serve.dialects import OPENAI, event
from octavo.serve.errors import ApiError
from octavo.serve.front import Front
from octavo.serve.guard import KEY
from octavo.serve.port import EnginePort
from octavo.serve.sse import EventStream

__all__ = ["routes", "shown_to"]

_EVERY = 0.25  # seconds
_MOST_WATCHERS = 16
_MOST_OF_ONE = 4  # key
_ENGINE_NAME = re.compile(r"(.+)\.[0-9a-f]{8}(-[0-9]+)?(~[0-9]+)?")  # see Job, and what is submitted anew
_KNOWN = 3  # leading values of a row that hold of anybody's: name, choice, state


def routes(front: Front) -> list[Route]:
    """The route of this API."""
    looks = _Looks(front.engine)

    @described(runs=True, gives=OPENAI.media_type)
    async def live(http: Request) -> EventStream:
        """GET /v1/live: a stream of snapshots, as long as somebody watches."""
        if len(front.watchers) >= _MOST_WATCHERS:
            message = f"{_MOST_WATCHERS} others watch already; close one of them."
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": "5"})
        over, tenant = asyncio.Event(), _tenant(front, http)
        if tenant is not None and sum(other == tenant for other in front.watchers.values()) >= _MOST_OF_ONE:
            message = f"You watch {_MOST_OF_ONE} times already; close one of them."
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": "5"})
        front.watchers[over] = tenant
        frames = _frames(looks, over, tenant)
        return EventStream(frames, {}, front.config.stall_timeout, lambda: front.watchers.pop(over, None), OPENAI)

    return [Route("/v1/live", front.answered(live), methods=["GET"])]


class _Looks:
    """The engine is asked once for all who watch."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._last: dict[str, Any] | None = None
        self._taken = 0.0
        self._asking = asyncio.Lock()

    async def look(self) -> dict[str, Any] | None:
        """What the engine does; None while there is none."""
        async with self._asking:
            if time.monotonic() - self._taken >= 0.9 * _EVERY:
                self._last = await self._engine.look()
                self._taken = time.monotonic()
        return self._last


async def _frames(looks: _Looks, over: asyncio.Event, tenant: str | None) -> AsyncGenerator[bytes, None]:
    while not over.is_set():
        seen = await looks.look()
        yield event({"engine": False} if seen is None else {"engine": True, **shown_to(seen, tenant)})
        try:
            await asyncio.wait_for(over.wait(), _EVERY)
        except asyncio.TimeoutError:
            continue


def _tenant(front: Front, http: Request) -> str | None:
    """Whose requests alone this client may know by name; None: all, where there are no keys."""
    return None if http.scope.get(KEY) is None else front.tenant(http)


def shown_to(seen: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """A snapshot (`octavo.engine.live`) with the ids that clients know; of others' requests no more than the state."""
    told, owners = dict(seen), seen["tenants"]
    del told["tenants"]
    ids = [found[1] if (found := _ENGINE_NAME.fullmatch(name)) else name for name in seen["names"]]
    if tenant is None:
        return {**told, "names": ids}
    known = [owner == tenant for owner in owners]
    return {
        **told,
        "names": [name if may else None for name, may in zip(ids, known, strict=True)],
        "rows": [row if known[row[0]] else row[:_KNOWN] + [None] * (len(row) - _KNOWN) for row in seen["rows"]],
        "ended": [row for row in seen["ended"] if known[row[0]]],
        "tree": [],
    }

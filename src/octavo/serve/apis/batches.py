"""OpenAI's batches: a file of requests, answered when nobody else needs the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.serve.batches.desk import Desk
from octavo.serve.batches.files import page
from octavo.serve.batches.records import BatchRecord, new_batch
from octavo.serve.described import described
from octavo.serve.dialects import json_response, warned
from octavo.serve.errors import invalid
from octavo.serve.front import Front
from octavo.serve.known_names import Names
from octavo.serve.params import check_metadata

__all__ = ["NAMES", "BatchRequest", "routes"]

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST = 30 * 86_400
_LIST = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "after": {"type": "string"}}
NAMES = Names(idle={"output_expires_after": "files are kept until they are deleted"})


class BatchRequest(Struct, kw_only=True):
    """Body of `/v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


def routes(front: Front, desk: Desk, others: Sequence[Route]) -> list[Route]:
    """The routes of this API; ``others``: those that lines may name are among them."""
    paths = {route.path for route in others}
    api, one = _Batches(front, desk, [path for path in _ENDPOINTS if path in paths]), "/v1/batches/{batch_id}"
    table = [
        ("/v1/batches", "POST", api.create),
        ("/v1/batches", "GET", api.list),
        (one, "GET", api.retrieve),
        (f"{one}/cancel", "POST", api.cancel),
    ]
    return [Route(path, front.answered(call), methods=[method]) for path, method, call in table]


class _Batches:
    def __init__(self, front: Front, desk: Desk, endpoints: list[str]) -> None:
        self._front, self._desk, self._endpoints = front, desk, endpoints

    @described(BatchRequest, names=NAMES, refuses=(429, 503))
    async def create(self, http: Request) -> Response:
        """POST /v1/batches: it runs by itself from now on."""
        front, owner = self._front, self._front.tenant(http)
        asked, warnings = await front.body(http, BatchRequest, NAMES)
        if asked.endpoint not in self._endpoints:
            raise invalid("endpoint", f"must be one of {', '.join(self._endpoints)}")
        source = self._desk.files.get(asked.input_file_id, owner, "input_file_id")
        if source.purpose != "batch":
            raise invalid("input_file_id", "must be a file that was uploaded with the purpose batch")
        check_metadata(asked.metadata)
        record = new_batch(
            owner,
            (asked.completion_window, _seconds(asked.completion_window)),
            endpoint=asked.endpoint,
            input_file_id=source.id,
            metadata=asked.metadata,
            model=front.model,
        )
        await self._desk.add(record)
        return warned(record.told(), warnings)

    @described(query=_LIST)
    async def list(self, http: Request) -> Response:
        """GET /v1/batches: the newest first."""
        return json_response(page(self._desk.of(self._front.tenant(http)), http.query_params, 20, 100))

    async def retrieve(self, http: Request) -> Response:
        """GET /v1/batches/{id}."""
        return json_response(self._named(http).told())

    @described(refuses=(409, 503))
    async def cancel(self, http: Request) -> Response:
        """POST /v1/batches/{id}/cancel: run no more of it; what is answered stays."""
        record = self._named(http)
        await self._desk.cancel(record)
        return json_response(record.told())

    def _named(self, http: Request) -> BatchRecord:
        return self._desk.get(http.path_params["batch_id"], self._front.tenant(http))


def _seconds(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST:
        raise invalid("completion_window", "must be a time of at most 30 days, as 24h, 90m or 7d")
    return seconds

"""OpenAI's files: what a batch is made from, and what it answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from octavo.serve.batches.desk import Desk
from octavo.serve.batches.files import Upload, page
from octavo.serve.batches.folder import told_of_disk
from octavo.serve.batches.form import Form, boundary_of
from octavo.serve.body import TooLarge
from octavo.serve.described import described
from octavo.serve.dialects import json_response, warned
from octavo.serve.errors import ApiError, invalid
from octavo.serve.front import Front
from octavo.serve.interrupt import within
from octavo.serve.names import Warnings, note

__all__ = ["routes"]

_KNOWN = ("purpose", "file")
_PURPOSES = ("batch", "batch_output")
_MOST_LISTED = 10_000
_OVERHEAD = 64 << 10  # bytes of a form beside its file
_FORM = {
    "purpose": {"enum": ["batch"]},
    "file": {"type": "string", "contentMediaType": "application/jsonl"},
}
_LIST = {
    "purpose": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}


def routes(front: Front, desk: Desk) -> list[Route]:
    """The routes of this API."""
    api, one = _Files(front, desk), "/v1/files/{file_id}"
    table = [
        ("/v1/files", "POST", api.upload),
        ("/v1/files", "GET", api.list),
        (one, "GET", api.retrieve),
        (one, "DELETE", api.delete),
        (f"{one}/content", "GET", api.content),
    ]
    return [Route(path, front.answered(call), methods=[method]) for path, method, call in table]


class _Files:
    def __init__(self, front: Front, desk: Desk) -> None:
        self._front, self._desk, self._store = front, desk, desk.files

    @described(form=_FORM, refuses=(408, 413, 415, 429, 503))
    async def upload(self, http: Request) -> Response:
        """POST /v1/files: a form with `purpose` (batch) and `file`."""
        boundary = boundary_of(http.headers.get("content-type", ""))
        declared = http.headers.get("content-length", "0")
        if declared.isdecimal() and (len(declared) > 15 or int(declared) > self._store.max_bytes + _OVERHEAD):
            raise TooLarge(self._store.max_bytes, "--max-batch-bytes")
        seconds = self._front.config.request_timeout
        late = ApiError(408, f"The file was not complete after {seconds:g} s.", headers={"Connection": "close"})
        with self._store.upload(self._front.tenant(http)) as upload:
            form = Form(boundary, upload.put)
            await within(seconds, partial(_read, http, form), late)
            return await self._kept(form, upload)

    async def _kept(self, form: Form, upload: Upload) -> Response:
        purpose, warnings = form.fields.get("purpose"), Warnings()
        if form.file_name is None:
            raise invalid("file", "is missing")
        if purpose != "batch":
            raise invalid("purpose", "must be batch: files serve nothing else here")
        for name in form.fields:
            if name not in _KNOWN:
                note(warnings, name, "files are kept until they are deleted, and have no other settings")
        record = await self._desk.on_disk(self._store.keep, upload, form.file_name, purpose)
        return warned(record.told(), warnings)

    @described(query=_LIST)
    async def list(self, http: Request) -> Response:
        """GET /v1/files: the newest first."""
        found, purpose = self._store.of(self._front.tenant(http)), http.query_params.get("purpose")
        order = http.query_params.get("order", "desc")
        if purpose not in (None, *_PURPOSES):
            raise invalid("purpose", f"must be one of {', '.join(_PURPOSES)}")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        found = [record for record in found if purpose in (None, record.purpose)]
        found = found if order == "desc" else found[::-1]
        return json_response(page(found, http.query_params, _MOST_LISTED, _MOST_LISTED))

    async def retrieve(self, http: Request) -> Response:
        """GET /v1/files/{id}."""
        return json_response(self._named(http).told())

    @described(gives="application/octet-stream")
    async def content(self, http: Request) -> Response:
        """GET /v1/files/{id}/content: its bytes."""
        record = self._named(http)
        safe = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return FileResponse(self._store.place(record), headers=safe, media_type="application/octet-stream")

    @described(refuses=(409, 503))
    async def delete(self, http: Request) -> Response:
        """DELETE /v1/files/{id}."""
        record = self._named(http)
        if self._desk.uses(record.id):
            raise ApiError(409, "A batch is being made from this file: cancel it, or wait for its end.", code="in_use")
        with told_of_disk():
            await self._desk.on_disk(self._store.delete, record)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    def _named(self, http: Request) -> Any:
        return self._store.get(http.path_params["file_id"], self._front.tenant(http))


async def _read(http: Request, form: Form) -> None:
    try:
        async for piece in http.stream():
            form.feed(piece)
    except ClientDisconnect as error:
        raise ApiError(400, "The client left before the file was complete.") from error
    form.finish()

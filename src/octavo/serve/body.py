"""Reading a request body: bounded while it arrives, then parsed as strict JSON of bounded depth."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError
from octavo.serve.interrupt import within

__all__ = ["TooLarge", "parse_json", "read_json"]

_DRAIN_BYTES = 32 << 20  # of a refused body; who sends more meets a closed connection
_DRAIN_SECONDS = 2.0
_IN_THREAD = 64 << 10  # bytes; a body above this would hold the event loop for more than a millisecond


async def read_json(request: Request, config: ServeConfig) -> dict[str, Any]:
    """The body as a JSON object. Raises ``ApiError`` 400, 408, 413 or 415."""
    _check_headers(request)
    message = f"The body was not complete after {config.body_timeout:g} s."
    late = ApiError(408, message, code="body_timeout", headers={"Connection": "close"})
    body = await within(config.body_timeout, partial(_read, request, config.max_body_bytes), late)
    if len(body) > _IN_THREAD:
        return await asyncio.to_thread(parse_json, body, config.max_json_depth)
    return parse_json(body, config.max_json_depth)


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """Strict JSON: no NaN, no number out of range, no lone surrogate, no name twice, nothing after the end."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "The body holds a number that is out of range.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, "The body is not valid JSON in UTF-8.", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    _check_shape(value, max_depth)
    try:
        json.loads(body, object_pairs_hook=_unique)  # the quick parser keeps the last of two in silence
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    return value


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "Send the body as JSON, with the header 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Send the body uncompressed, without a 'Content-Encoding' header.")


async def _read(request: Request, limit: int) -> bytes:
    """All bytes of the body; stops reading as soon as there are more than `limit`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise TooLarge(limit)
    chunks = bytearray()
    try:
        async for chunk in request.stream():
            chunks += chunk
            if len(chunks) > limit:
                raise TooLarge(limit)
    except ClientDisconnect as error:
        raise ApiError(400, "The client left before the body was complete.") from error
    return bytes(chunks)


def _check_shape(value: Any, max_depth: int) -> None:
    """Depth and number length, without recursion."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, int):
            if item.bit_length() > 64:
                raise ApiError(400, "The body holds an integer of more than 64 bits.", code="invalid_json")
            continue
        if depth > max_depth:
            raise _too_deep(max_depth)
        children = item.values() if isinstance(item, dict) else item
        stack.extend((child, depth + 1) for child in children if isinstance(child, dict | list | int))


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ApiError(400, "The body has an object with the same name twice; send one of them.", code="invalid_json")


def _too_deep(max_depth: int) -> ApiError:
    return ApiError(400, f"The body is nested more than {max_depth} levels deep.", code="invalid_json")


class TooLarge(ApiError):
    """A 413 for a body above the limit that a flag sets."""

    def __init__(self, limit: int, flag: str = "--max-body-bytes") -> None:
        message = f"The body is larger than {limit} bytes; send less, or start the server with a larger {flag}."
        super().__init__(413, message, code="body_too_large", headers={"Connection": "close"})

    def response(self, content: bytes | None = None) -> Any:
        """The answer, which lets the client finish its writing."""
        return _Draining(super().response(content))


class _Draining:
    """An answer that is sent at once, while the body still arrives, and ends when some more of it has been dropped.

    A connection that is closed with bytes unread is reset, and a client that writes before it reads would never see
    the answer.
    """

    def __init__(self, answer: Response) -> None:
        self.status_code = answer.status_code
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, drop at most `_DRAIN_BYTES` for at most `_DRAIN_SECONDS`, then end it."""
        answer = self._answer
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drain(receive), _DRAIN_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    left = _DRAIN_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):  # the body's end, or the client's
            return

"""How a family of APIs spells what all of them have: errors, and the frames of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.serve.errors import ApiError, Error
from octavo.serve.names import Warnings, warning_headers

__all__ = ["DONE", "NOTHING", "OPENAI", "Dialect", "event", "json_response", "named_event", "warned"]

DONE = b"data: [DONE]\n\n"
NOTHING = "octavo.nothing"  # where the scope of a stream has what its dialect calls `nothing`


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event that carries its `type` as its name, too."""
    return b"event: " + value["type"].encode() + b"\n" + event(value)


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def warned(answer: dict[str, Any], warnings: Warnings) -> Response:
    """A JSON answer with the warnings about its request, in a field and in a header."""
    if not warnings:
        return json_response(answer)
    return json_response({**answer, "warnings": warnings}, warning_headers(warnings))


@dataclass(frozen=True)
class Dialect:
    """`error_body` is the JSON of an error, `frame` wraps one in a stream, `end` closes every stream,
    `nothing` may stand between two frames without a meaning.

    `theirs` maps our name of a parameter to this API's, for errors that blame one. `error_kind` is the type of
    `error_body`.
    """

    error_body: Callable[[ApiError], Any]
    frame: Callable[[Any], bytes]
    media_type: str = "text/event-stream; charset=utf-8"
    end: bytes = b""
    nothing: bytes = b":\n\n"
    theirs: Mapping[str, str] = field(default_factory=dict)
    error_kind: type[msgspec.Struct] = Error

    def error_response(self, error: ApiError) -> Any:
        """The error as an HTTP answer."""
        return error.response(msgspec.json.encode(self.error_body(self.blamed(error))))

    def error_frame(self, error: ApiError) -> bytes:
        """The error inside a stream."""
        return self.frame(self.error_body(self.blamed(error)))

    def blamed(self, error: ApiError) -> ApiError:
        """The error with the parameter's name as this API's clients know it."""
        name = self.theirs.get(error.param or "")
        if name is None or error.param is None or error.is_spelled:
            return error
        message = error.message
        if message.startswith(error.param):
            message = name + message[len(error.param) :]
        return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


OPENAI = Dialect(ApiError.body, event, end=DONE)

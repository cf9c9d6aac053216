"""What the head of a request says, besides its key: how long its body is, who sends it, what it is called."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request

from octavo.serve.errors import invalid

__all__ = ["REQUEST_ID", "credentials", "is_small", "request_id_of"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_SMALL_BODY = 1024  # bytes


def is_small(http: Request) -> bool:
    """Whether a request's body is so short that all work on its text takes well below a millisecond."""
    length = http.headers.get("content-length", "")
    return length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= _SMALL_BODY


def credentials(http: Request) -> str:
    """What a client identifies itself by; Anthropic's have a header of their own."""
    return http.headers.get("authorization") or http.headers.get("x-api-key", "")


def request_id_of(http: Request, named: str | None) -> str:
    """The id that the client chose (field, then header), or a fresh one."""
    chosen = named if named is not None else http.headers.get("x-request-id")
    if chosen is None:
        return uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(chosen):
        raise invalid("request_id", "must have 1 to 128 letters, digits or any of . _ : -")
    return chosen

"""Errors of the HTTP API, in OpenAI's body: ``{"error": {"message", "type", "param", "code"}}``.

A message names field, value and remedy. It never holds request text, a file path or the name of a Python type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.core.admission import Refusal
from octavo.core.errors import InvalidInput, shorten

__all__ = ["ApiError", "Error", "from_invalid_input", "from_validation", "invalid", "no_such_model", "refused"]
__all__ += ["safe_name"]
_MOST_NAMED = 8  # models, where one is refused

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_JSON_WORDS = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}
_RENAMED = {"prompt_token_ids": "prompt", "token_ids": "prompt"}
_MISSING = re.compile(r"Object missing required field `(.*)`")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class ErrorDetail(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an error says: `param` names the parameter at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of an error, in OpenAI's shape."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that refuses a request: status, message, the parameter at fault and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.is_counted = False  # in the metrics
        self.is_spelled = False  # `param` is the client's own name already, and not ours

    def body(self) -> dict[str, Any]:
        """The JSON value of the error."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, content: bytes | None = None) -> Any:
        """The error as an HTTP answer; `content` replaces OpenAI's body."""
        content = msgspec.json.encode(self.body()) if content is None else content
        return Response(content, self.status, self.headers, media_type="application/json")


def invalid(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that blames `param`."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def refused(refusal: Refusal) -> ApiError:
    """A 429 that says when to come again."""
    headers = {"Retry-After": str(refusal.retry_after)}
    return ApiError(429, refusal.message, code=refusal.code, headers=headers)


def safe_name(name: str) -> str:
    """A field name fit for a message: short and plain, or a placeholder."""
    return name if _NAME.fullmatch(name) else "(unprintable name)"


def no_such_model(served: Sequence[str]) -> ApiError:
    """The refusal of a name; it tells some of those that are ``served``."""
    more = len(served) - _MOST_NAMED
    others = f" and {more} others, see /v1/models" if more > 0 else ""
    names = f"{'is' if len(served) == 1 else 'are'} {', '.join(served[:_MOST_NAMED])}{others}"
    message = f"model: there is no such model here; served {names}."
    return ApiError(404, message, param="model", code="model_not_found")


def from_invalid_input(error: InvalidInput) -> ApiError:
    """The engine refused a value: a 400. Text values stay out of the message, numbers are shown."""
    field = _RENAMED.get(error.field, error.field)
    plain = isinstance(error.value, bool | int | float)
    shown = f" = {shorten(error.value)}" if plain else ""
    return ApiError(400, f"{field}{shown}: {error.remedy}", param=safe_name(re.split(r"[.\[]", field)[0]))


def from_validation(error: msgspec.ValidationError, prefix: str = "") -> ApiError:
    """A field of the wrong type, or missing: a 400 that says, in JSON's words, what was expected, and of what."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    missing = _MISSING.fullmatch(text)
    if missing:
        text, path = "is missing", f"{path}.{missing[1]}".lstrip(".")
    param = prefix + path or None
    text = re.sub(r"`([^`]*)`", lambda found: _json_words(found[1]), text)
    if param is None:
        return ApiError(400, f"The body cannot be read: {text[:200]}.", code="invalid_type")
    top = re.split(r"[.\[]", param)[0]
    return ApiError(400, f"{param}: {text[:200]}.", param=top, code="invalid_type")


def _json_words(expected: str) -> str:
    return " or ".join(_JSON_WORDS.get(word, word) for word in expected.split(" | "))

"""The page at `/`: files that are the same for everybody, so they need no key. What they ask for does."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["PATHS", "routes"]

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PATHS = frozenset(_FILES)

# No script, style or connection but our own; no markup out of text (trusted types), no frame around it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """One route for each file: no path of a request ever names a file."""
    return [_route(path, file) for path, file in _FILES.items()]


def _route(path: str, file: Path) -> Route:
    content, kind = file.read_bytes(), _TYPES[file.suffix]

    async def answer(http: Request) -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return Route(path, answer, methods=["GET"])

"""`GET /openapi.json`: the document of the routes, made of the routes themselves and of what their handlers say.

A body's schema is that of its type (`described.py`), with the limits of `body_limits.py`. What becomes of other names
is said in extensions: `x-octavo-other-names` (name: the parameter that it means), `x-octavo-refused` and
`x-octavo-no-effect` (name: why).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.serve.body_limits import limited
from octavo.serve.described import Description, description_of
from octavo.serve.dialects import Dialect
from octavo.serve.front import Front
from octavo.serve.guard import OPEN
from octavo.serve.known_names import Names
from octavo.serve.static import PATHS

__all__ = ["document", "document_route"]

_Json = dict[str, Any]
DialectOf = Callable[[str], Dialect]
_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_EVERY = (400, 403, 500)
_OF_BODY = (404, 408, 413, 415)
_OF_PATH = (404,)
_OF_RUN = (409, 429, 503, 504)
_WHEN = {
    400: "Something in the request cannot be honoured; the message says what to do.",
    401: "No such API key.",
    403: "A host or an origin that the server does not know.",
    404: "There is nothing of that name here.",
    408: "The request came too late, or its own deadline is over.",
    409: "A request with this id is still running.",
    413: "The body is too large.",
    415: "The body is not plain JSON.",
    429: "There is no room now.",
    500: "A fault of the server.",
    503: "The engine does not run, or the server takes no new requests.",
    504: "The request took longer than the server lets any.",
}
_WARNINGS = {"description": "What had no effect, by name.", "schema": {"type": "string"}}
_ID = {"description": "The request's id.", "schema": {"type": "string"}}
_RETRY = {"description": "Seconds.", "required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}


def document_route(front: Front, routes: Sequence[Route], dialect_of: DialectOf, keyed: bool) -> Route:
    """The route of the document, made when it is first asked for; ``routes`` come to hold this one, too."""
    made: list[bytes] = []

    async def openapi(http: Request) -> Response:
        """GET /openapi.json: this document."""
        if not made:
            made.append(msgspec.json.encode(document(front, routes, dialect_of, keyed)))
        return Response(made[0], media_type="application/json")

    return Route("/openapi.json", front.answered(openapi), methods=["GET"])


def document(front: Front, routes: Iterable[Route], dialect_of: DialectOf, keyed: bool) -> _Json:
    """The document (OpenAPI 3.1) of these routes, but for the files of the page. ``keyed``: it asks for keys."""
    writer = _Writer(front, dialect_of, keyed)
    paths: dict[str, _Json] = {}
    for route in routes:
        if route.path not in PATHS:
            paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", route.path), {}).update(writer.operations(route))
    info = {"title": "Octavo", "version": __version__, "description": "See docs/api.md."}
    components = {"schemas": writer.schemas, "responses": writer.refusals}
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


class _Writer:
    """Writes operations, and gathers the schemas and the refusals that they refer to."""

    def __init__(self, front: Front, dialect_of: DialectOf, keyed: bool) -> None:
        self._front, self._dialect_of, self._keyed = front, dialect_of, keyed
        self.schemas: _Json = {}
        self.refusals: _Json = {}

    def operations(self, route: Route) -> _Json:
        """Each method of a route; HEAD is GET without its answer's body."""
        methods = sorted((route.methods or set()) - {"HEAD"})
        return {method.lower(): self._operation(route, method) for method in methods}

    def _operation(self, route: Route, method: str) -> _Json:
        about, named = description_of(route.endpoint), _PATH_PARAMETER.findall(route.path)
        told: _Json = {
            "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_"),
            "summary": (route.endpoint.__doc__ or "").strip(),
            "parameters": [
                *(_parameter(name, "path", {"type": "string", "minLength": 1}) for name in named),
                *(_parameter(name, "query", schema) for name, schema in about.query.items()),
            ],
            "responses": self._responses(route, about, bool(named)),
        }
        if about.takes:
            told["requestBody"] = {"required": True, "content": {"application/json": {"schema": self._body(about)}}}
        if about.form:
            form = {"type": "object", "properties": about.form, "required": sorted(about.form)}
            told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
        if self._asks_for_key(route):
            told["security"] = [{"bearer": []}]
        return told

    def _asks_for_key(self, route: Route) -> bool:
        return self._keyed and route.path not in OPEN

    def _body(self, about: Description) -> _Json:
        """The schema of a body: of its type, or of any of them."""
        refs = [self._taken(kind, about.names, about.needs) for kind in about.takes]
        for name, (kind, names) in about.parts.items():
            part = self._taken(kind, names)
            for taken in about.takes:
                self.schemas[taken.__name__]["properties"][name] = {"anyOf": [part, {"type": "null"}]}
        return refs[0] if len(refs) == 1 else {"anyOf": refs}

    def _taken(self, kind: Any, names: Names, needs: Sequence[str] = ()) -> _Json:
        """A reference to the schema of a body's type, with its limits and all that is known of names."""
        ref, fields = self._kind(kind), kind.__struct_fields__
        schema = limited(self.schemas[kind.__name__], self._front, needs)
        more = {
            "x-octavo-other-names": {name: to for name, to in names.aliases.items() if to in fields},
            "x-octavo-refused": {name: why for name, (_, why) in names.refused.items() if name not in fields},
            "x-octavo-no-effect": {name: why for name, why in names.idle.items() if name not in fields},
        }
        needed = sorted({*schema.get("required", ()), *needs})
        told = {name: what for name, what in more.items() if what}
        self.schemas[kind.__name__] = {**schema, "required": needed, **told}
        return ref

    def _kind(self, kind: Any) -> _Json:
        """A reference to the schema of a type."""
        (ref,), found = msgspec.json.schema_components([kind], ref_template=_REF)
        for name, schema in found.items():
            self.schemas.setdefault(name, schema)
        return dict(ref)

    def _responses(self, route: Route, about: Description, named: bool) -> _Json:
        dialect = self._dialect_of(route.path)
        fine = self._fine(about, dialect)
        unwell = {str(status): {"description": _WHEN[status], "content": fine["content"]} for status in about.unwell}
        statuses = {
            *_EVERY,
            *(_OF_BODY * bool(about.takes)),
            *(_OF_PATH * named),
            *(_OF_RUN * about.runs),
            *about.refuses,
        }
        statuses |= {401} if self._asks_for_key(route) else set()
        refusals = {str(status): self._refusal(status, dialect) for status in sorted(statuses)}
        return {"200": fine, **refusals, **unwell}

    def _refusal(self, status: int, dialect: Dialect) -> _Json:
        """A reference to the answer that refuses, in this dialect."""
        name = f"{dialect.error_kind.__name__}{status}"
        content = {"application/json": {"schema": self._kind(dialect.error_kind)}}
        headers = {"headers": {"Retry-After": _RETRY}} if status in (429, 503) else {}
        self.refusals[name] = {"description": _WHEN[status], "content": content, **headers}
        return {"$ref": f"#/components/responses/{name}"}

    def _fine(self, about: Description, dialect: Dialect) -> _Json:
        headers = {"X-Octavo-Warnings": _WARNINGS} if about.takes else {}
        headers |= {"X-Request-Id": _ID} if about.takes and about.runs else {}
        if isinstance(about.gives, str):
            content: _Json = {_media(about.gives): {}}
        else:
            content = {"application/json": {"schema": self._kind(about.gives) if about.gives else {"type": "object"}}}
        if about.streams:
            content[_media(dialect.media_type)] = {}
        return {"description": "The answer.", "headers": headers, "content": content}


def _parameter(name: str, place: str, schema: Any) -> _Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _media(kind: str) -> str:
    """A media type without its parameters."""
    return kind.partition(";")[0]

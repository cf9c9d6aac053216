"""What became of a request, and why it took as long as it did."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.serve.dialects import json_response
from octavo.serve.errors import ApiError
from octavo.serve.front import REQUEST_ID, Front
from octavo.serve.guard import KEY
from octavo.serve.keys import Key

__all__ = ["routes"]


def routes(front: Front) -> list[Route]:
    """The routes of this API."""

    async def status(http: Request) -> Response:
        """GET /v1/requests/{id}: what became of it."""
        key: Key | None = http.scope.get(KEY)
        owner, name = "" if key is None else key.name, http.path_params["request_id"]
        if not REQUEST_ID.fullmatch(name):  # no other process is asked what it could not take for a name
            return json_response({"id": name, "object": "request", "status": "unknown"})
        return json_response(await front.describe(owner, name))

    async def explain(http: Request) -> Response:
        """GET /v1/requests/{id}/explain: why it took as long as it did."""
        name = http.path_params["request_id"]
        found = await front.engine.explain(name, front.tenant(http)) if REQUEST_ID.fullmatch(name) else []
        if not found:
            message = "No such request is remembered: it never ran, is another key's, or ran too long ago."
            raise ApiError(404, message, code="request_not_found")
        return json_response({"id": name, "object": "request.explanation", "requests": found})

    return [
        Route("/v1/requests/{request_id}", front.answered(status), methods=["GET"]),
        Route("/v1/requests/{request_id}/explain", front.answered(front.metered(explain)), methods=["GET"]),
    ]

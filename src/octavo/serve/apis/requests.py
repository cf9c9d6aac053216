"""What became of a request."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.serve.dialects import json_response
from octavo.serve.front import Front

__all__ = ["routes"]


def routes(front: Front) -> list[Route]:
    """The routes of this API."""

    async def status(http: Request) -> Response:
        return json_response(front.ledger.describe(http.path_params["request_id"]))

    return [Route("/v1/requests/{request_id}", front.answered(status), methods=["GET"])]

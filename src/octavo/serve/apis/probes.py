"""Health, metrics, version: what machines ask of a server. None of it costs the engine a token."""

from __future__ import annotations

import logging

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.serve.described import described
from octavo.serve.dialects import json_response
from octavo.serve.front import Front

__all__ = ["routes"]

_log = logging.getLogger(__name__)


def routes(front: Front) -> list[Route]:
    """The routes of this API."""
    api, get = _Probes(front), ["GET"]
    return [
        Route("/health", api.ready, methods=get),
        Route("/health/live", api.live, methods=get),
        Route("/health/ready", api.ready, methods=get),
        Route("/version", api.version, methods=get),
        Route("/metrics", api.metrics, methods=get),
    ]


class Health(Struct):
    """Answer of the routes of health: `status` is `ok` or `unhealthy`."""

    status: str
    reason: str | None
    model: str


_METRICS = "text/plain; version=0.0.4"


class _Probes:
    def __init__(self, front: Front) -> None:
        self._front = front

    @described(gives=Health, unwell=(503,))
    async def live(self, http: Request) -> Response:
        """GET /health/live: 503 once the engine has work and makes no progress with it, so that it is restarted."""
        return self._answer(self._stuck())

    @described(gives=Health, unwell=(503,))
    async def ready(self, http: Request) -> Response:
        """GET /health/ready, /health: 503 while a request that comes now would not be served soon."""
        return self._answer(self._stuck() or await self._busy())

    def _answer(self, problem: str | None) -> Response:
        body = Health("ok" if problem is None else "unhealthy", problem, self._front.model)
        return json_response(body, status=200 if problem is None else 503)

    def _stuck(self) -> str | None:
        problem = self._front.engine.health_problem()
        if problem is None:
            return None
        _log.error("unhealthy: %s", problem)
        return problem.split(":")[0]  # what follows is for the log alone

    async def _busy(self) -> str | None:
        """What stands between a request that comes now and the engine."""
        stats, most = self._front.engine.stats(), self._front.config.ready_timeout
        inside = stats.get("num_running", 0) + stats.get("num_waiting", 0)
        if inside and stats.get("last_step_age", 0.0) > most:
            return f"no step has ended for {most:g} s"
        return await self._front.refuses_now()

    async def version(self, http: Request) -> Response:
        """GET /version."""
        return json_response({"version": __version__, "layout": self._front.config.resolved_layout})

    @described(gives=_METRICS)
    async def metrics(self, http: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(await self._front.metrics_text(), media_type=_METRICS)

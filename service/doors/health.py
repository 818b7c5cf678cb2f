"""Whether the process lives, whether it takes work, and what it has measured."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.doors.exchange import Exchange
from service.doors.problem_details import MEDIA_TYPE, describe
from service.errors import Unavailable
from service.lifecycle import Lifecycle
from service.telemetry import Metrics


def router(lifecycle: Lifecycle, metrics: Metrics) -> APIRouter:
    """GET /livez, /readyz and /metrics."""
    routes = APIRouter()

    @routes.head("/livez", include_in_schema=False)
    @routes.get("/livez", tags=["operations"], summary="Whether the process answers")
    async def livez() -> dict[str, Any]:
        return {"live": True}

    @routes.head("/readyz", include_in_schema=False, response_model=None)
    @routes.get(
        "/readyz",
        tags=["operations"],
        summary="Whether new work is taken",
        description="200 once the device has answered a warm-up; 503 before, while draining, and when it is lost.",
        response_model=None,
        responses={503: {"description": "Not ready", "content": {MEDIA_TYPE: {}}}},
    )
    async def readyz(request: Request) -> Response | dict[str, Any]:
        if lifecycle.is_ready:
            return {"ready": True, "state": lifecycle.state.value}
        exchange: Exchange = request.scope["attn.exchange"]
        failure, body, headers = describe(Unavailable(f"not ready: {lifecycle.state.value}"), exchange.request_id)
        exchange.outcome = failure.name
        return Response(body, status_code=failure.http, headers=dict(headers), media_type=MEDIA_TYPE)

    @routes.get("/metrics", tags=["operations"], summary="Prometheus metrics", response_class=Response)
    async def read_metrics() -> Response:
        metrics.ready.set(lifecycle.is_ready)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes

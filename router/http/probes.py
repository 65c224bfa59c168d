"""Health for probes and load balancers, and the metrics that the metrics port has too."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router.http.errors import from_status
from router.http.host import Host
from rpc.status import draining


def routes(host: Host) -> Sequence[BaseRoute]:
    """/health and /health/ready: whether new requests are welcome. /health/live: whether the process works. /metrics."""

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        host.serving()
        if host.frame.draining():
            raise from_status(draining("this router"))
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        # In a thread: it takes milliseconds, and the gauges ask the event loop.
        page, kind = await asyncio.to_thread(host.frame.metrics.exposed, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/metrics", metrics),
    ]

"""The HTTP door's server: health, metrics, bounds, drain. A router over fakes, asked by a plain HTTP client."""

import asyncio

import httpx

from tests.redis_server import cell, redis_url
from tests.router_world import World, router_world

__all__ = ["cell", "redis_url"]

HTTP = {"http_listen": "127.0.0.1:0"}


def base_of(world: World, router: int = 0) -> str:
    """Where a router's HTTP door is."""
    frame = world.routers[router].frame
    assert frame is not None
    return f"http://{frame.addresses['http_address']}"


async def test_health_and_metrics(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **HTTP) as world, httpx.AsyncClient(base_url=base_of(world)) as http:
        for path in ("/health", "/health/live", "/health/ready"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        metrics = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert 'tandem_http_server_calls_total{route="/health",status="200"} 1.0' in metrics.text
        assert "tandem_router_running_requests" in metrics.text


async def test_what_is_not_there_is_an_error_object(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **HTTP) as world, httpx.AsyncClient(base_url=base_of(world)) as http:
        missing = await http.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "NOT_FOUND"
        wrong = await http.post("/health")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "MethodNotAllowedError"


async def test_b41_a_draining_router_is_alive_and_not_ready(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, drain_settle_s=1.0, **HTTP) as world:
        async with httpx.AsyncClient(base_url=base_of(world)) as http:
            draining = asyncio.create_task(world.routers[0].drain())
            await asyncio.sleep(0)
            ready, live = await http.get("/health"), await http.get("/health/live")
            assert (ready.status_code, live.status_code) == (503, 200)
            assert ready.headers["retry-after"] == "1"
            assert ready.json()["error"]["code"] == "DRAINING"
        assert await draining == 0

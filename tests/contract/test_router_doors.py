"""The doors of a router: ids used twice, bounds, pools and stores that are away, drain, models, health, metrics, traces."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.embedded import EmbeddedServer
from tandem.v1 import inference_pb2 as pb
from tests.otlp_collector import OtlpCollector
from tests.redis_server import cell, redis_url
from tests.router_world import World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("router", [0, 1], ids=["same-router", "other-router"])
async def test_b18_an_id_has_one_body(redis_url: str, cell: str, router: int) -> None:
    """While the request runs and after its end."""
    async with router_world(redis_url, cell, routers=2) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        refusals = [await world.clients[router].generate(request("r1", "other"))]
        world.decode.script.output.release()
        assert (await running).code is grpc.StatusCode.OK
        refusals.append(await world.clients[router].generate(request("r1", "other")))
        for refused in refusals:
            assert refused.error is not None and not refused.events
            assert (refused.code, refused.error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
        assert len(world.decode.opens) == 1
        await world.at_rest()


async def test_a_full_queue_refuses_with_quota_and_delay(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, queue_requests=2, decode_info={"max_sequences": 1}) as world:
        world.decode.script.output.hold()
        first = world.client.begin(request("r0"))
        await world.client.until_state("r0", "decoding")
        waiting = [world.client.begin(request(f"r{number}")) for number in (1, 2)]
        for number in (1, 2):
            await world.client.until_state(f"r{number}", "queued")
        refused = await world.client.generate(request("r3"))
        assert refused.error is not None and refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.error.reason == "QUEUE_FULL" and refused.error.retry_after_s and refused.error.quotas[0].value == 2
        assert await world.client.state("r3") == ""
        await world.client.generate(request("r3"))  # it comes back
        await world.client.generate(request("r4"), metadata=(("grpc-previous-rpc-attempts", "1"),))  # it was elsewhere before
        assert world.routers[0].frame is not None
        assert "tandem_router_offered_requests_total 4" in world.routers[0].frame.metrics.text()
        world.decode.script.output.release()
        answers = await asyncio.gather(first, *waiting)
        assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
        await world.at_rest()


async def test_a_full_queue_keeps_nobody_from_a_request_that_runs_elsewhere(redis_url: str, cell: str) -> None:
    """It needs no room here; its client may have lost the router that has it."""
    acme = {"metadata": (("tandem-tenant", "acme"),)}
    changes = {"queue_requests": 1, "tenant_pages": 1, "trust_tenant_header": True}
    async with router_world(redis_url, cell, routers=2, **changes) as world:
        world.decode.script.output.hold()
        running = []
        for router, name, call, state in ((0, "r0", acme, "decoding"), (1, "r1", {}, "decoding"), (1, "r2", {}, "queued")):
            running.append(world.clients[router].begin(request(name), **call))
            await world.clients[1 - router].until_state(name, state)  # as the store has it
        for name, text, reason in (("r3", "hello", "QUEUE_FULL"), ("r0", "another", "IDEMPOTENCY_KEY_REUSED")):
            refused = await world.clients[1].generate(request(name, text), **acme)
            assert refused.error is not None and refused.error.reason == reason
        again = world.clients[1].begin(request("r0"), **acme)
        world.decode.script.output.release()
        answers = await asyncio.gather(again, *running)
        assert [answer.code for answer in answers] == [grpc.StatusCode.OK] * 4
        assert answers[0].events == answers[1].events and len(world.decode.opens) == 3
        await world.at_rest()


@pytest.mark.parametrize("limits", [{"tenant_concurrent_requests": 1}, {"tenant_tokens_per_s": 0.001, "tenant_token_burst": 8}])
async def test_a_tenants_limit_keeps_nobody_from_a_request_that_runs_elsewhere(
    redis_url: str, cell: str, limits: dict[str, float]
) -> None:
    async with router_world(redis_url, cell, routers=2, **limits) as world:
        world.decode.script.output.hold()
        first, beside = world.client.begin(request("r0")), world.clients[1].begin(request("r1"))
        for client, name in ((world.clients[1], "r0"), (world.client, "r1")):
            await client.until_state(name, "decoding")  # as the store has it
        refused = await world.clients[1].generate(request("r2"))
        assert refused.error is not None and refused.error.reason in ("TENANT_CONCURRENCY", "TENANT_TOKEN_RATE")
        again = world.clients[1].begin(request("r0"))
        world.decode.script.output.release()
        answers = await asyncio.gather(first, again, beside)
        assert [answer.code for answer in answers] == [grpc.StatusCode.OK] * 3
        assert answers[0].events == answers[1].events and len(world.decode.opens) == 2
        await world.at_rest()


async def test_no_members_is_unavailable_and_leaves_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        await world.prefill.stop()
        await until(partial(_refusal, world, itertools.count(1)), "NO_MEMBER", 60.0)
        await world.at_rest()


async def _refusal(world: World, numbers: Iterator[int]) -> str:
    """Why one more request is refused; each has an id of its own, for one that came before its router knew has an end."""
    answer = await world.client.generate(request(f"again-{next(numbers)}"))
    return answer.error.reason if answer.error else ""


async def test_without_a_decode_member_no_limit_of_pages_is_met(redis_url: str, cell: str) -> None:
    """Nobody knows how large a page is: the request may come again, it is not too long."""
    async with router_world(redis_url, cell, tenant_pages=1, total_pages=1) as world:
        assert (await world.client.generate(request("r0"))).code is grpc.StatusCode.OK
        await world.decode.stop()
        await until(partial(_refusal, world, itertools.count(1)), "NO_MEMBER", 60.0)


async def test_a_draining_pool_takes_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.load.draining = True
        world.decode.tell()
        await until(partial(_refusal, world, itertools.count(1)), "NO_MEMBER", 60.0)


async def test_two_routers_share_one_budget(redis_url: str, cell: str) -> None:
    """Each router alone would admit both; the store lets one wait, and its wait ends."""
    async with router_world(redis_url, cell, routers=2, decode_info={"total_pages": 1}) as world:
        world.decode.script.output.hold()
        first = world.clients[0].begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        second = world.clients[1].begin(request("r2"))
        await world.client.until_state("r2", "queued")
        books, faults = await world.clients[1].books()
        assert books["store:pages:member:decode-0"] == 1 and not faults
        world.decode.script.output.release()
        assert {(await first).code, (await second).code} == {grpc.StatusCode.OK}
        await world.at_rest()


async def test_tenants_are_taken_from_metadata_only_when_trusted(redis_url: str, cell: str) -> None:
    metadata = (("tandem-tenant", "acme"),)
    async with router_world(redis_url, cell) as world:
        await world.client.generate(request("r1"), metadata=metadata)
        assert (await world.client.get("r1")).tenant == "default"
    async with router_world(redis_url, cell, trust_tenant_header=True) as world:
        await world.client.generate(request("r2"), metadata=metadata)
        assert (await world.client.get("r2")).tenant == "acme"
        refused = await world.client.generate(request("r3"), metadata=(("tandem-tenant", "a" * 129),))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_and_unknown_records(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, prefills=2) as world:
        (model,) = (await world.client.stub.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.snapshot, model.context_tokens, model.vocabulary_size) == ("fake", "snapshot-1", 512, 300)
        assert (model.prefill_members, model.decode_members) == (2, 1)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await world.client.get("never")
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_get_shows_a_live_request(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.ending.hold()
        running = world.client.begin(request("r1"))
        await world.decode.script.ending.reached_by(1)
        await until(lambda: _selected(world), 3)
        record = await world.client.get("r1")
        assert record.state == pb.REQUEST_STATE_DECODING and record.usage.returned_tokens == 3
        assert record.timings.first_token_s > 0 and record.timings.total_s > 0
        world.decode.script.ending.release()
        await running


async def test_b41_drain_finishes_what_runs_and_refuses_what_comes(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        draining = asyncio.create_task(world.routers[0].drain())
        await until(lambda: _refused(world), "DRAINING")
        world.decode.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK
        assert await asyncio.wait_for(draining, 5) == 0


async def test_b41_what_does_not_end_in_time_gets_a_typed_error(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, drain_timeout_s=1.0) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        await asyncio.wait_for(world.routers[0].drain(), 5)
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "shutting_down")
        assert answer.completed.state == pb.REQUEST_STATE_FAILED


async def test_while_the_store_is_away_what_runs_runs_on(cell: str) -> None:
    with EmbeddedServer() as server:
        async with router_world(server.url, cell) as world:
            world.decode.script.output.hold()
            running = world.client.begin(request("r1"))
            await world.client.until_state("r1", "decoding")
            os.killpg(server.process_group, signal.SIGSTOP)
            refused = await world.client.generate(request("r2"))
            assert refused.error is not None and refused.error.reason == "STORE_UNAVAILABLE"
            assert refused.code is grpc.StatusCode.UNAVAILABLE and refused.error.retry_after_s
            health = health_pb2_grpc.HealthStub(world.client.channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
            world.decode.script.output.release()
            answer = await asyncio.wait_for(running, 10)
            answer.check_order()
            assert answer.code is grpc.StatusCode.OK
            assert (await world.client.get("r1")).state == pb.REQUEST_STATE_FINISHED
            os.killpg(server.process_group, signal.SIGCONT)
            await until(lambda: _unwritten(world), 0, 10)
            assert (await world.client.get("r1")).state == pb.REQUEST_STATE_FINISHED
            assert (await world.client.generate(request("r2"))).code is grpc.StatusCode.OK


async def test_b41_a_router_that_stops_waits_for_the_store_to_take_its_ends(redis_url: str, cell: str) -> None:
    """The client has its end, and nobody else knows it: without the wait another router would call the request lost."""
    async with router_world(redis_url, cell, routers=2, drain_timeout_s=10.0) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        world.links[0].cut = True
        world.decode.script.output.release()
        assert (await asyncio.wait_for(running, 10)).code is grpc.StatusCode.OK
        stopping = asyncio.create_task(world.routers[0].drain())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stopping), 0.5)
        world.links[0].cut = False
        await stopping
        record = await world.clients[1].get("r1")
        assert (record.state, record.usage.returned_tokens) == (pb.REQUEST_STATE_FINISHED, 3)


async def test_metrics_count_and_gauges_return_to_zero(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        await world.client.generate(request("r1"))
        await world.client.generate(request("", "x"))
        await world.at_rest()
        assert world.routers[0].frame is not None
        lines = world.routers[0].frame.metrics.text().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert values['tandem_router_requests_total{outcome="max_output_tokens"}'] == "1.0"
        assert values['tandem_router_refusals_total{cause="invalid"}'] == "1.0"
        assert values['tandem_router_tokens_total{kind="returned"}'] == "3.0"
        assert values["tandem_router_open_tickets"] == values["tandem_router_open_streams"] == "0.0"
        assert values['tandem_router_members{pool="decode"}'] == "1.0"
        assert not [line for line in values if line.startswith("tandem_telemetry_errors_total")]


async def test_b52_the_trace_goes_through_every_hop(redis_url: str, cell: str) -> None:
    """The router tells of Generate, queue and send; members get Generate as the parent of what they do."""
    async with OtlpCollector() as collector, router_world(redis_url, cell, otlp_endpoint=collector.endpoint) as world:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await world.client.generate(request("r1"), metadata=(("traceparent", parent),))
        await world.at_rest()
        assert world.routers[0].frame is not None
        await asyncio.to_thread(world.routers[0].frame.tracing.flush)
        await collector.wait_for(3)
        (root,) = collector.named("Generate")
        assert root.trace_id == parent.split("-")[1] and root.parent_id == parent.split("-")[2]
        assert {span.name for span in collector.spans if span.parent_id == root.span_id} == {"queue", "send"}
        told = {world.decode.opens[0].traceparent, world.prefill.requests[0].traceparent}
        assert {tuple(one.split("-")[1:3]) for one in told} == {(root.trace_id, root.span_id)}


async def _members(client: object) -> int:
    return (await client.stub.ListModels(pb.ListModelsRequest())).models[0].decode_members  # type: ignore[attr-defined]


async def _selected(world: object) -> int:
    return (await world.client.get("r1")).usage.selected_tokens  # type: ignore[attr-defined]


async def _refused(world: object) -> str:
    answer = await world.client.generate(request("late"))  # type: ignore[attr-defined]
    return answer.error.reason if answer.error else ""


async def _unwritten(world: object) -> int:
    books, _ = await world.client.books()  # type: ignore[attr-defined]
    return books["unwritten_ends"]

"""A served process in this event loop: gate, health, reflection, admin, and the order of its end."""

import asyncio
import re
import socket
import urllib.request
from collections import defaultdict

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc.admin import Books
from rpc.application import ExitCode
from rpc.channels import internal_channel
from rpc.incarnation import proven_dead
from rpc.server_settings import ServerSettings
from rpc.serving import Process
from rpc.status import details_from, draining
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

SERVICE = "tandem.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Example(inference_pb2_grpc.InferenceServiceServicer):
    """An application whose calls end when the test says so."""

    service_names = (SERVICE,)

    def __init__(self, frame):
        self.frame = frame
        self.may_start = asyncio.Event()
        self.may_end = asyncio.Event()
        self.entered = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = 0
        self.refuses = False
        self.stands_still = False
        self.log = []
        self.reached = defaultdict(asyncio.Event)

    def note(self, step):
        self.log.append(step)
        self.reached[step].set()

    async def until(self, step):
        await asyncio.wait_for(self.reached[step].wait(), 10)

    def add_to(self, server):
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def start(self):
        self.note("start")
        await self.may_start.wait()

    def stalled(self, now):
        return self.stands_still

    async def check(self):
        return Books({"running": self.running}, ("a page is missing",) if self.running else ())

    def begin_drain(self):
        self.note("begin_drain")
        self.refuses = True

    async def drained(self):
        self.note("drained")
        await self.idle.wait()

    async def stop(self):
        self.note("stop")
        self.may_end.set()

    async def ListModels(self, request, context):  # noqa: N802
        if self.refuses:
            raise draining(self.frame.name)
        self.running += 1
        self.idle.clear()
        self.entered.set()
        try:
            await self.may_end.wait()
        finally:
            self.running -= 1
            self.idle.set()
        return inference_pb2.ListModelsResponse()


class Served:
    """The process, its application, and clients of it."""

    def __init__(self, **settings):
        self.settings = ServerSettings(**{"drain_settle_s": 0.0, "drain_timeout_s": 10.0, "metrics_port": None, **settings})

    async def __aenter__(self):
        self.process = Process(self.build, self.settings, "router")
        self.built = asyncio.Event()
        self.opening = asyncio.create_task(self.process.open())
        await asyncio.wait_for(self.built.wait(), 10)
        await self.application.until("start")
        self.frame = self.application.frame
        self.channel = internal_channel(self.frame.address)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.client = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc):
        self.application.may_start.set()
        self.application.may_end.set()
        await asyncio.gather(self.opening, return_exceptions=True)
        await self.channel.close()
        await self.process.close()

    def build(self, frame):
        self.application = Example(frame)
        self.built.set()
        return self.application

    async def ready(self):
        self.application.may_start.set()
        return await asyncio.wait_for(self.opening, 10)

    async def status(self, name):
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status

    def call(self):
        return self.client.ListModels(inference_pb2.ListModelsRequest(), timeout=20)

    async def failure(self):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.call()
        return details_from(failed.value)


async def statuses(served):
    return [await served.status(name) for name in ("", "readiness", SERVICE, "liveness")]


async def test_while_loading_it_lives_and_is_not_ready():
    async with Served() as served:
        assert await statuses(served) == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        found = await served.failure()
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        assert found.retry_after_s is not None
        frame = await served.ready()
        assert await statuses(served) == [SERVING] * 4
        assert frame.address.startswith("127.0.0.1:") and frame.name == f"router-{frame.address}"
        assert not proven_dead(frame.incarnation)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await served.status("nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_what_runs_ends_well_and_the_order_is_kept():
    async with Served() as served:
        await served.ready()
        call = asyncio.ensure_future(served.call())
        await asyncio.wait_for(served.application.entered.wait(), 10)
        ending = asyncio.create_task(served.process.drain())
        await served.application.until("drained")
        assert served.frame.draining()
        assert await statuses(served) == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        assert (await served.failure()).reason == "DRAINING"
        served.application.may_end.set()
        await call
        assert await asyncio.wait_for(ending, 10) == ExitCode.OK
        assert served.application.log == ["start", "begin_drain", "drained", "stop"]


async def test_new_work_is_still_taken_while_balancers_settle():
    async with Served(drain_settle_s=10.0) as served:
        await served.ready()
        served.application.may_end.set()
        ending = asyncio.create_task(served.process.drain())
        watch = served.health.Watch(health_pb2.HealthCheckRequest(service=""))
        while (await asyncio.wait_for(watch.read(), 10)).status != NOT_SERVING:
            pass
        await served.call()
        ending.cancel()


@pytest.mark.slow
async def test_one_budget_then_the_rest_is_cut_with_a_typed_end():
    async with Served(drain_timeout_s=0.3) as served:
        await served.ready()
        call = asyncio.ensure_future(served.call())
        await asyncio.wait_for(served.application.entered.wait(), 10)
        assert await asyncio.wait_for(served.process.drain(), 10) == ExitCode.DRAIN_CUT
        assert served.application.log[-1] == "stop"
        await call  # stop() ended it, not the server


@pytest.mark.slow
async def test_b42_a_stall_is_not_alive_and_recovers():
    async with Served() as served:
        await served.ready()
        watch = served.health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        served.application.stands_still = True
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        assert await served.status("") == NOT_SERVING
        served.application.stands_still = False
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        assert await served.status("") == SERVING


async def test_a_crash_ends_the_drain_at_once():
    async with Served() as served:
        await served.ready()
        call = asyncio.ensure_future(served.call())
        await asyncio.wait_for(served.application.entered.wait(), 10)
        ending = asyncio.create_task(served.process.drain())
        await asyncio.to_thread(served.process.crashed, ZeroDivisionError("broken"))
        assert await asyncio.wait_for(ending, 10) == ExitCode.CRASHED
        await call


async def test_books_are_told():
    async with Served() as served:
        await served.ready()
        call = asyncio.ensure_future(served.call())
        await asyncio.wait_for(served.application.entered.wait(), 10)
        found = await member_pb2_grpc.AdminServiceStub(served.channel).Check(member_pb2.CheckRequest())
        assert dict(found.books) == {"running": 1} and list(found.faults) == ["a page is missing"]
        served.application.may_end.set()
        await call


async def names_of(channel):
    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask())
    return {service.name for answer in [await call.read()] for service in answer.list_services_response.service}


async def test_reflection_only_when_asked_for():
    async with Served(reflection=True) as served:
        await served.ready()
        assert await names_of(served.channel) == {
            SERVICE,
            "tandem.pools.v1.AdminService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
    async with Served() as served:
        await served.ready()
        # Nothing is written: a message that meets the answer on its way would be another error.
        call = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = Process(Example, ServerSettings(listen=address), "router")
        with pytest.raises(OSError, match=f"cannot listen on {address}: the port is taken"):
            await process.open()
        await process.close()


@pytest.mark.parametrize(
    ("advertise", "shown"),
    [
        ("pod-1", r"pod-1:\d+"),
        ("pod-1:99", "pod-1:99"),
        ("[::1]", r"\[::1\]:\d+"),
        ("[::1]:5", r"\[::1\]:5"),
        ("fd00::7", r"\[fd00::7\]:\d+"),
    ],
)
async def test_the_address_that_others_use(advertise, shown):
    frames = []

    def build(frame):
        frames.append(frame)
        raise LookupError("far enough")

    process = Process(build, ServerSettings(advertise=advertise, metrics_port=None), "router")
    with pytest.raises(LookupError, match="far enough"):
        await process.open()
    await process.close()
    assert re.fullmatch(shown, frames[0].address)


@pytest.mark.slow
async def test_metrics_are_shown_on_their_port():
    async with Served(metrics_port=0) as served:
        await served.ready()
        served.application.may_end.set()
        await served.call()
        url = f"http://127.0.0.1:{served.process.metrics_port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as answer:
            text = answer.read().decode()
    line = f'tandem_rpc_server_calls_total{{code="OK",method="{SERVICE}/ListModels"}} 1.0'
    assert line in text and "tandem_event_loop_lag_seconds_bucket" in text and 'kind="router"' in text

"""What a running cell says about itself: routers, members, their metrics. Asked, not judged."""

import asyncio
import email.utils
import secrets
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from rpc.channels import internal_channel
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect

CALL_S = 5.0
REQUEST_S = 30.0
METRICS_S = 5.0
BUILD_METRIC = "tandem_build_info"


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """A router. problem: why it does not answer. faults: of its recount; None when it does not tell."""

    address: str
    problem: str = ""
    models: tuple[pb.Model, ...] = ()
    faults: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member. problem: why it does not answer, and then there is nothing else."""

    address: str
    problem: str = ""
    info: Any = None
    load: Any = None
    faults: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process by its metrics: version of Tandem, kind, clock against ours in seconds. problem: why there are none."""

    address: str
    problem: str = ""
    version: str = ""
    kind: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of one token. ahead_s: the router's clock against ours; doubt_s: half of the time to its answer."""

    problem: str = ""
    total_s: float = 0.0
    ahead_s: float | None = None
    doubt_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


async def see_router(address: str) -> RouterSeen:
    """What it serves, and whether its books add up."""
    try:
        async with connect(address) as stub:
            answer = await stub.ListModels(pb.ListModelsRequest(), timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        return RouterSeen(address, _words(error))
    return RouterSeen(address, "", tuple(answer.models), await _faults(address))


async def see_member(address: str) -> MemberSeen:
    """Its description, and whether its books add up."""
    try:
        async with internal_channel(address) as channel:
            stub = member_pb2_grpc.MemberServiceStub(channel)
            watch = stub.Watch(member_pb2.WatchRequest(router=f"doctor-{secrets.token_hex(4)}"), timeout=CALL_S)
            news = await watch.read()
            watch.cancel()
    except grpc.aio.AioRpcError as error:
        return MemberSeen(address, _words(error))
    if not isinstance(news, member_pb2.WatchResponse) or not news.HasField("info"):
        return MemberSeen(address, "it answered without a description")
    return MemberSeen(address, "", news.info, news.load, await _faults(address))


def see_process(address: str) -> ProcessSeen:
    """Version and clock, from its metrics at host:port. The clock comes from a header of whole seconds."""
    try:
        before = time.time()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=METRICS_S) as page:
            after, said = time.time(), page.headers.get("Date")
            text = page.read().decode()
    except (OSError, ValueError) as error:
        return ProcessSeen(address, str(getattr(error, "reason", error)))
    ahead_s = email.utils.parsedate_to_datetime(said).timestamp() + 0.5 - (before + after) / 2 if said else 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == BUILD_METRIC:
                return ProcessSeen(address, "", sample.labels.get("version", ""), sample.labels.get("kind", ""), ahead_s)
    return ProcessSeen(address, f"no {BUILD_METRIC} there: it is no process of a cell")


async def answer_once(address: str, model: str) -> Answered:
    """Ask for one token and read its record."""
    request = pb.GenerateRequest(request_id=f"doctor-{secrets.token_hex(8)}", model=model, text="Hello", max_output_tokens=1)
    request.sampling.temperature = 0.0
    request.stop.ignore_eos = True
    began, wall = time.perf_counter(), time.time()
    first_s = 0.0
    try:
        async with connect(address) as stub:
            async for event in stub.Generate(request, timeout=REQUEST_S):
                first_s = first_s or time.perf_counter() - began
                last = event
            total_s = time.perf_counter() - began
            record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=CALL_S)).record
    except grpc.aio.AioRpcError as error:
        return Answered(_words(error))
    timings = last.completed.timings
    phases = {name: getattr(timings, name) for name in ("queue_s", "prefill_s", "handover_s", "first_token_s")}
    if not record.transitions:
        return Answered("", total_s, None, 0.0, phases)
    created = record.transitions[0].at.ToNanoseconds() / 1e9
    return Answered("", total_s, created - (wall + first_s / 2), first_s / 2, phases)


async def see_all(routers: Sequence[str], members: Sequence[str]) -> tuple[list[RouterSeen], list[MemberSeen]]:
    """Those of a kind side by side: what does not answer costs CALL_S once."""
    asked = asyncio.gather(*(see_router(one) for one in routers))
    return await asked, await asyncio.gather(*(see_member(one) for one in members))


async def _faults(address: str) -> tuple[str, ...] | None:
    try:
        async with internal_channel(address) as channel:
            admin = member_pb2_grpc.AdminServiceStub(channel)
            return tuple((await admin.Check(member_pb2.CheckRequest(), timeout=CALL_S)).faults)
    except grpc.aio.AioRpcError:
        return None


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"

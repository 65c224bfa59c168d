"""A pool member's process: the frame that every server has, and Watch."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from member import watch
from member.config import MemberSettings
from member.prefix_feed import PrefixFeed
from member.watch import MemberInfo, MemberLoad, MemberServicer
from rpc import serving
from rpc.admin import Books
from rpc.application import Application, Build, Frame
from rpc.serving import Process
from tandem.pools.v1 import member_pb2_grpc
from telemetry.aliases import GatewayGauges, VllmAliases

#: Most seconds that a scrape waits for the event loop.
ALIASES_TIMEOUT_S = 1.0


class Service(Application, Protocol):
    """What a member does: an application that can tell what it is and how busy it is."""

    @property
    def prefixes(self) -> PrefixFeed:
        """What routers are told of its prefix cache."""

    def info(self) -> MemberInfo:
        """What this member is; asked after `start` has returned."""

    def load(self) -> MemberLoad:
        """How busy it is now. Cheap, on the event loop: asked every 50 ms while a router watches."""


BuildService = Callable[[Frame], Service]


class Member:
    """rpc.application.Application for one member: a service with Watch beside it."""

    def __init__(self, service: Service, frame: Frame) -> None:
        self._service = service
        self._watch = MemberServicer(service.info, service.load, frame.draining, frame.crashed, service.prefixes)
        self._frame = frame

    @property
    def service_names(self) -> Sequence[str]:
        return (*self._service.service_names, watch.SERVICE_NAME)

    def add_to(self, server: grpc.aio.Server) -> None:
        self._service.add_to(server)
        member_pb2_grpc.add_MemberServiceServicer_to_server(self._watch, server)

    async def start(self) -> None:
        await self._service.start()
        settings = self._frame.settings
        if isinstance(settings, MemberSettings) and settings.metrics_aliases == "vllm":
            loop = asyncio.get_running_loop()
            # A scrape runs in a thread of its own, and the load is told on the event loop.
            VllmAliases(
                self._frame.metrics,
                lambda: asyncio.run_coroutine_threadsafe(self._gateway_gauges(), loop).result(ALIASES_TIMEOUT_S),
            )

    def stalled(self, now: float) -> bool:
        return self._service.stalled(now)

    async def check(self) -> Books:
        return await self._service.check()

    def begin_drain(self) -> None:
        self._service.begin_drain()

    async def drained(self) -> None:
        await self._service.drained()

    async def _gateway_gauges(self) -> GatewayGauges:
        info, load = self._service.info(), self._service.load()
        used = min(1.0, max(0.0, 1 - load.free_pages / max(1, info.total_pages)))
        return GatewayGauges(info.model, load.running_sequences, load.waiting_sequences, used, info.page_tokens, info.total_pages)

    async def stop(self) -> None:
        # Both, whatever becomes of the other: watches never end by themselves and would use up the server's grace.
        await asyncio.gather(self._service.stop(), self._watch.close())


def member_of(build: BuildService) -> Build:
    """What makes a member out of a frame."""
    return lambda frame: Member(build(frame), frame)


def open_member(build: BuildService, settings: MemberSettings, kind: str) -> Process:
    """A member within this process and event loop: `open` it, use it, `drain` and `close` it."""
    return Process(member_of(build), settings, kind)


def run_member(build: BuildService, settings: MemberSettings, kind: str) -> int:
    """Run a member of `kind` ("prefill", "decode") until a signal; returns its exit code (rpc.application.ExitCode)."""
    return serving.run(member_of(build), settings, kind)

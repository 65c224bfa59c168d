"""A pool member's process: the frame that every server has, and Watch."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from member import watch
from member.config import MemberSettings
from member.watch import MemberInfo, MemberLoad, MemberServicer
from rpc import serving
from rpc.admin import Books
from rpc.application import Application, Frame
from rpc.serving import Process
from tandem.pools.v1 import member_pb2_grpc


class Service(Application, Protocol):
    """What a member does: an application that can tell what it is and how busy it is."""

    def info(self) -> MemberInfo:
        """What this member is; asked after `start` has returned."""

    def load(self) -> MemberLoad:
        """How busy it is now. Cheap, on the event loop: asked every 50 ms while a router watches."""


BuildService = Callable[[Frame], Service]


class _Member:
    """A service with Watch beside it."""

    def __init__(self, service: Service, frame: Frame) -> None:
        self._service = service
        self._watch = MemberServicer(service.info, service.load, frame.draining)

    @property
    def service_names(self) -> Sequence[str]:
        return (*self._service.service_names, watch.SERVICE_NAME)

    def add_to(self, server: grpc.aio.Server) -> None:
        self._service.add_to(server)
        member_pb2_grpc.add_MemberServiceServicer_to_server(self._watch, server)

    async def start(self) -> None:
        await self._service.start()

    def stalled(self, now: float) -> bool:
        return self._service.stalled(now)

    async def check(self) -> Books:
        return await self._service.check()

    def begin_drain(self) -> None:
        self._service.begin_drain()

    async def drained(self) -> None:
        await self._service.drained()

    async def stop(self) -> None:
        # Both, whatever becomes of the other: watches never end by themselves and would use up the server's grace.
        await asyncio.gather(self._service.stop(), self._watch.close())


def open_member(build: BuildService, settings: MemberSettings, kind: str) -> Process:
    """A member within this process and event loop: `open` it, use it, `drain` and `close` it."""
    return Process(lambda frame: _Member(build(frame), frame), settings, kind)


def run_member(build: BuildService, settings: MemberSettings, kind: str) -> int:
    """Run a member of `kind` ("prefill", "decode") until a signal; returns its exit code (rpc.application.ExitCode)."""
    return serving.run(lambda frame: _Member(build(frame), frame), settings, kind)

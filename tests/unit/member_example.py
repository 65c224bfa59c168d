"""A member that holds calls open, for tests of the process: `python -m tests.unit.member_example FLAGS`."""

import asyncio
import sys
from typing import Annotated

from member.config import MemberSettings
from member.engine_thread import EngineThread
from member.inbox import Inbox
from member.prefix_feed import PrefixFeed
from member.process import run_member
from member.watch import MemberInfo, MemberLoad, MemberRole
from rpc.admin import Books
from rpc.settings import load_or_exit, setting
from rpc.status import draining, unavailable
from tandem.pools.v1 import prefill_pb2, prefill_pb2_grpc


class Settings(MemberSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    fail_start: Annotated[bool, setting("Fail while loading.")] = False
    hang_start: Annotated[bool, setting("Load for ever.")] = False


class Example(prefill_pb2_grpc.PrefillServiceServicer):
    """Prefill streams until it is stopped; the request id "crash" breaks the engine thread."""

    service_names = ("tandem.pools.v1.PrefillService",)

    def __init__(self, frame):
        self.frame = frame
        self.inbox = Inbox(frame.settings.inbox_messages)
        self.engine = EngineThread(self.turn, self.inbox, on_crash=self.on_crash)
        self.loop = asyncio.get_running_loop()
        self.refuses = False
        self.ends = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = 0

    def turn(self):
        for what in self.inbox.drain():
            if what == "crash":
                raise ZeroDivisionError("the engine broke")
        return False

    def on_crash(self, crash):
        self.loop.call_soon_threadsafe(self.ends.set)
        self.frame.crashed(crash)

    def add_to(self, server):
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def start(self):
        if self.frame.settings.fail_start:
            raise FileNotFoundError("the model file m.gguf is not there")
        if self.frame.settings.hang_start:
            print("loading", flush=True)
            await asyncio.Event().wait()
        self.engine.start()

    def stalled(self, now):
        return self.engine.stalled(now, self.frame.settings.stall_after_s)

    async def check(self):
        return Books({"running": self.running})

    def begin_drain(self):
        self.refuses = True

    async def drained(self):
        await self.idle.wait()

    async def stop(self):
        self.ends.set()
        await asyncio.to_thread(self.engine.stop, 1)
        await self.idle.wait()

    prefixes = PrefixFeed()

    def info(self):
        me = self.frame
        return MemberInfo(me.name, me.incarnation, me.address, MemberRole.PREFILL, "m", "s", "l", 16, 10, 64, 100, 4)

    def load(self):
        return MemberLoad(free_pages=9, running_sequences=self.running)

    async def Prefill(self, request, context):  # noqa: N802
        if self.refuses:
            raise draining(self.frame.name)
        if request.key.request_id == "crash":
            self.inbox.put_nowait("crash")
        self.running += 1
        self.idle.clear()
        try:
            await context.write(prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(queued_tokens=1)))
            if request.key.request_id != "short":
                await self.ends.wait()
                raise unavailable("the member stops", "STOPPED")
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()


if __name__ == "__main__":
    sys.exit(run_member(Example, load_or_exit(Settings, prog="member-example"), "prefill"))

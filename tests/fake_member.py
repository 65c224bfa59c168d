"""What the fakes of both kinds of members share: gates that tests hold, a server, an identity, a Watch stream."""

import asyncio
import uuid

import grpc

from tandem.pools.v1 import grant_pb2, member_pb2, member_pb2_grpc

SNAPSHOT = "snapshot-1"
PAGE_TOKENS = 16


class Gate:
    """Open unless a test holds it; tells how many have come to it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._step = asyncio.Event()
        self._steps = 0
        self._reached = asyncio.Condition()
        self.reached = 0

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def step(self) -> None:
        """Lets one more through while it is held."""
        self._steps += 1
        self._step.set()

    async def passed(self, *others: asyncio.Event) -> None:
        """Waits until the gate is open, or one of `others` is set."""
        async with self._reached:
            self.reached += 1
            self._reached.notify_all()
        await first_of(self._open, self._step, *others)
        if self._steps and not self._open.is_set():
            self._steps -= 1
            if not self._steps:
                self._step.clear()

    async def reached_by(self, count: int, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s), self._reached:
            await self._reached.wait_for(lambda: self.reached >= count)


async def first_of(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    if any(event.is_set() for event in events):
        return
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FakeMember:
    """What both fakes share: a server, an identity, a Watch stream."""

    role = member_pb2.MEMBER_ROLE_UNSPECIFIED

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.address = ""
        self.info_changes: dict[str, object] = {}
        self.load = member_pb2.MemberLoad()
        self.adapters: list[grant_pb2.Adapter] = []
        self.silent = False
        #: What is told of the prefix cache with the next news, once.
        self.prefixes: member_pb2.PrefixNews | None = None
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        member_pb2_grpc.add_MemberServiceServicer_to_server(self, server)
        self.add_to(server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """As a killed process: every stream breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """Another incarnation at the same address."""
        port = int(self.address.rpartition(":")[2])
        await self.stop()
        self.incarnation = uuid.uuid4().hex
        await self.start(port)

    def tell(self) -> None:
        """Watchers get the load now."""
        self._changed.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def info(self) -> member_pb2.MemberInfo:
        info = member_pb2.MemberInfo(
            peer=grant_pb2.Peer(member=self.name, incarnation=self.incarnation, address=self.address),
            role=self.role,
            model="fake",
            model_snapshot=SNAPSHOT,
            layout_fingerprint="f" * 32,
            page_tokens=PAGE_TOKENS,
            total_pages=1000,
            context_tokens=512,
            vocabulary_size=300,
            max_sequences=64,
            max_queued_tokens=100_000,
        )
        for key, value in self.info_changes.items():
            setattr(info, key, value)
        info.adapters.extend(self.adapters)
        return info

    async def Watch(self, request: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        introduced = False
        while True:
            if not self.silent:
                info = None if introduced else self.info()
                prefixes, self.prefixes = self.prefixes, None
                await context.write(member_pb2.WatchResponse(info=info, load=self.load, prefixes=prefixes))
                introduced = True
            self._changed.clear()
            try:
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
            except TimeoutError:
                pass

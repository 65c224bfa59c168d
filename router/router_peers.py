"""Other routers of the cell: the stream of a request that runs there is passed on to the client that asked here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_status import rpc_status

from router.streams import EOF
from rpc.status import DOMAIN, StatusError, details_from, draining

ATTACH = "/tandem.v1.InferenceService/Attach"
CANCEL = "/tandem.v1.InferenceService/Cancel"
#: A stream that is passed on and brings nothing for so long, in seconds: it is asked whether its router still has it.
QUIET_S = 1.0
#: Metadata key that says whose a call is, set by something trusted in front of a router.
TENANT_KEY = "tandem-tenant"
#: Metadata key of a call that a router passes on; it is never passed on again.
FORWARDED_KEY = "tandem-forwarded"


class PassedOn(StatusError):
    """The status of another router, for the client as it is."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        said = details_from(error)
        super().__init__(said.code, said.message, said.reason)
        self.ours = said.domain == DOMAIN
        self._status: Any = rpc_status.from_call(error) if self.ours else None  # type: ignore[arg-type]

    def to_proto(self) -> Any:
        """The google.rpc.Status."""
        return self._status if self.ours else super().to_proto()


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of passing a stream on: events written, and the status that ended it (None: OK). `dropped`: it was given up
    because the other router does not have the request any more."""

    events: int
    error: PassedOn | None
    dropped: bool = False


@dataclass(slots=True)
class _Passing:
    """A stream that is passed on. `dropped`: its router is gone, though the call may still look open."""

    call: Any
    events: int = 0
    dropped: bool = False


@dataclass(slots=True)
class _Line:
    channel: grpc.aio.Channel
    users: int = 0


class RouterPeers:
    """Streams from other routers. A channel is open as long as a stream uses it."""

    def __init__(self, router: str, dial: Callable[[str], grpc.aio.Channel]) -> None:
        self._router = router
        self._dial = dial
        self._lines: dict[str, _Line] = {}
        self._calls: set[Any] = set()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._calls)

    async def attach(
        self,
        address: str,
        request: bytes,
        write: Callable[[bytes], Awaitable[None]],
        there: Callable[[], Awaitable[bool]],
        *,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
        timeout_s: float | None = None,
    ) -> Passed:
        """Writes what the router at `address` answers to this AttachRequest, as it is; `there` is asked now and then, while
        nothing comes, whether it still has the request. Raises StatusError when this router stops meanwhile."""
        async with self._channel(address) as channel:
            method = channel.unary_stream(ATTACH, None, None)
            call: Any = method(request, timeout=timeout_s, metadata=(*metadata, (FORWARDED_KEY, self._router)))
            passing = _Passing(call)
            self._calls.add(call)
            self._idle.clear()
            watching = asyncio.create_task(_watch(passing, there), name=f"watch {address}")
            try:
                while (event := await call.read()) is not EOF:
                    await write(event)
                    passing.events += 1
            except grpc.aio.AioRpcError as error:
                return Passed(passing.events, PassedOn(error))
            except asyncio.CancelledError:
                # grpc reports a call that was cancelled on this side like a cancelled task.
                if self._stopping:
                    raise draining("this router") from None
                if passing.dropped:
                    return Passed(passing.events, None, dropped=True)
                raise
            finally:
                watching.cancel()
                self._calls.discard(call)
                call.cancel()
                if not self._calls:
                    self._idle.set()
        return Passed(passing.events, None)

    async def cancel(self, address: str, request: bytes, timeout_s: float | None) -> bytes:
        """What the router at `address` answers to this CancelRequest. Raises StatusError, its own or UNAVAILABLE."""
        try:
            async with self._channel(address) as channel:
                method = channel.unary_unary(CANCEL, None, None)
                answer: bytes = await method(request, timeout=timeout_s, metadata=((FORWARDED_KEY, self._router),))
                return answer
        except grpc.aio.AioRpcError as error:
            raise PassedOn(error) from None

    async def idle(self) -> None:
        """Returns when no stream is passed on."""
        await self._idle.wait()

    def stop(self) -> None:
        """Ends every stream that is passed on: its client can take it up at another router."""
        self._stopping = True
        for call in list(self._calls):
            call.cancel()

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(self._dial(address))
        line.users += 1
        try:
            yield line.channel
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[address]
                await line.channel.close(None)


async def _watch(passing: _Passing, there: Callable[[], Awaitable[bool]]) -> None:
    """Gives up a call to a router that stands still, when it does not have the request any more."""
    while True:
        seen = passing.events
        await asyncio.sleep(QUIET_S)
        if passing.events == seen and not await there():
            passing.dropped = True
            passing.call.cancel()
            return

"""The client's side of a simulated RPC: what the code under test uses of grpc.aio channels and calls, with their semantics."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from router.streams import EOF
from tests.simulation.loop import PROCESS, Process
from tests.simulation.wires import Connection, Item, Network, Pipe

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, Any], ...]]

CANCELLED: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())


class Stream:
    """One RPC on its way: two pipes, and who is at each end."""

    def __init__(self, connection: Connection, method: str, metadata: Any, deadline: float | None) -> None:
        self.connection = connection
        self.method = method
        self.metadata = metadata
        self.deadline = deadline
        self.up, self.down = Pipe(connection), Pipe(connection)
        self.call: Call | None = None
        self.serving: Any = None
        self._ends = 2
        connection.streams[self] = None

    def release(self) -> None:
        """A cut has healed."""
        self.up.release()
        self.down.release()

    def broken(self, culprit: Process | None) -> None:
        """The connection is gone; each side learns it when it gets to it."""
        network = self.connection.network
        seconds = network.delay() if culprit is not None else 0.0
        if self.call is not None and culprit is not self.connection.client:
            network.later(seconds, self.call.broke)
        if self.serving is not None and culprit is not self.connection.server_process:
            network.later(seconds, self.serving.client_left)

    def over(self) -> None:
        """One side is done with it."""
        self._ends -= 1
        if not self._ends:
            self.connection.streams.pop(self, None)


class Call:
    """A call in any of the shapes that grpc.aio has."""

    def __init__(self, channel: "Channel", method: str, codecs: tuple[Any, Any], timeout: float | None, metadata: Any) -> None:
        self._channel = channel
        self._network = channel.network
        self._write_bytes, self._read_bytes = codecs
        self._status: Status | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self._ghost: Stream | None = None
        self._cancelled_here = False
        self._half_closed = False
        self._timer: asyncio.TimerHandle | None = None
        deadline = None
        if timeout is not None:
            loop = self._network.loop
            deadline = loop.time() + timeout
            self._timer = loop.call_later(max(0.0, timeout), self._timed_out)
        channel.calls[self] = None
        connection, refusal = channel.connect()
        self._stream: Stream | None = None
        if connection is None:
            self._network.later(refusal[0], self._end, (grpc.StatusCode.UNAVAILABLE, refusal[1], ()))
            return
        self._stream = stream = Stream(connection, method, tuple(metadata or ()), deadline)
        stream.call = self
        stream.down.noticed = self._noticed
        stream.serving = connection.server_process.accept(stream)
        stream.up.post(Item("open"))

    # what the code under test calls

    def done(self) -> bool:
        """Whether the status is known."""
        return self._status is not None

    def cancelled(self) -> bool:
        """Whether the status is CANCELLED."""
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        """End it on this side."""
        if self._status is not None:
            return False
        self._cancelled_here = True
        self._reset()
        self._end(CANCELLED)
        return True

    async def code(self) -> grpc.StatusCode:
        """The status, when it is known."""
        await asyncio.shield(self._ended)
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """The status's text."""
        await self.code()
        assert self._status is not None
        return self._status[1]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called once the status is known."""
        self._ended.add_done_callback(lambda _: callback(self))

    async def read(self) -> Any:
        """The next message, or EOF after the last one. Raises AioRpcError when the call did not end well."""
        if self._status is not None:
            self._raise()
            return EOF
        try:
            item = await self._take()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if item is None:
            self._raise()
            return EOF
        return self._read_bytes(item.value)

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the receiver is too far behind."""
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError("RPC is half closed after calling done_writing")
        if self._stream is None:
            await asyncio.shield(self._ended)
            self._raise()
            return
        try:
            await self._stream.up.send(self._write_bytes(message))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._status is not None:
            self._raise()

    async def done_writing(self) -> None:
        """No more messages."""
        if self._status is None and not self._half_closed:
            self._half_closed = True
            if self._stream is not None:
                self._stream.up.post(Item("half_close"))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise AssertionError("a unary call ended well without an answer")
        await self.code()
        self._raise()
        return message

    # what happens to it

    def may_be_repeated(self, request: bytes) -> None:
        """The same request comes a second time, now and then; nobody hears its answer."""
        network, weather = self._network, self._network.weather
        if network.rng.random() < weather.repeat_chance and self._stream is not None:
            # Never before the original: a repetition is what somebody sends who believes the first was lost.
            network.later(3 * weather.delay_s + 2 * weather.slow_s, self._repeat, self._stream, request)

    def _repeat(self, original: Stream, request: bytes) -> None:
        if self._status is not None or original.connection.lost:
            return
        self._ghost = ghost = Stream(original.connection, original.method, original.metadata, original.deadline)
        ghost.over()
        ghost.down.noticed = lambda item: bool(ghost.down.took(item))
        ghost.serving = original.connection.server_process.accept(ghost)
        for item in (Item("open"), Item("message", request), Item("half_close")):
            ghost.up.post(item)

    async def _take(self) -> Item | None:
        """The next message; None when the status is known instead."""
        if self._stream is None:
            await asyncio.shield(self._ended)
            return None
        item = await self._stream.down.take()
        self._look()
        if item is None or item.kind != "message":
            return None
        return item

    def _noticed(self, item: Item) -> bool:
        """The status counts as here when every message before it was taken."""
        assert self._stream is not None
        if item.kind == "end" and not self._stream.down.arrived:
            self._end(item.value)
            return True
        return False

    def _look(self) -> None:
        assert self._stream is not None
        arrived = self._stream.down.arrived
        if arrived and arrived[0].kind == "end":
            self._end(arrived[0].value)

    def broke(self) -> None:
        """The connection is gone."""
        if self._status is None:
            self._end((grpc.StatusCode.UNAVAILABLE, "Socket closed", ()))

    def _timed_out(self) -> None:
        if self._status is None:
            self._reset()
            self._end((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _reset(self) -> None:
        if self._stream is not None:
            self._stream.up.post(Item("reset"))

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.down.close()
            self._stream.over()
        if self._ghost is not None:
            self._ghost.up.post(Item("reset"))
        self._channel.calls.pop(self, None)
        if not self._ended.done():
            self._ended.set_result(None)

    def _raise(self) -> None:
        assert self._status is not None
        if self._cancelled_here:
            raise asyncio.CancelledError
        code, details, trailing = self._status
        if code is not grpc.StatusCode.OK:
            raise AioRpcError(code, Metadata(), Metadata(*trailing), details, details)


class Channel:
    """What `dial` gives: a channel from the process that runs now to an address."""

    def __init__(self, network: Network, address: str) -> None:
        process = PROCESS.get()
        assert process is not None, "only a process dials"
        self.network = network
        self.address = address
        self.calls: dict[Call, None] = {}
        self._process = process
        self._connection: Connection | None = None

    def connect(self) -> tuple[Connection | None, tuple[float, str]]:
        """The connection, or after how long and with which words there is none."""
        if self._connection is not None and not self._connection.lost:
            return self._connection, (0.0, "")
        server = self.network.servers.get(self.address)
        if server is not None and self.network.is_cut(self._process.name, server.name):
            return None, (self.network.weather.connect_s, "failed to connect to all addresses; connection timed out")
        if server is None or server.dead:
            return None, (2 * self.network.delay(), "failed to connect to all addresses; connection refused")
        self._connection = Connection(self.network, self._process, server)
        if server.halted:
            self.network.suspect({server.name})
        return self._connection, (0.0, "")

    def unary_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        """One message each way."""
        return self._one_request(method, request_serializer, response_deserializer)

    unary_stream = unary_unary

    def stream_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        """Messages both ways."""
        codecs = (request_serializer or bytes, response_deserializer or bytes)

        def begin(requests: Any = None, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            assert requests is None, "the simulated channel has no request iterators"
            return Call(self, method, codecs, timeout, metadata)

        return begin

    async def close(self, grace: float | None = None) -> None:
        """Ends what is open."""
        for call in list(self.calls):
            call.cancel()
        if self._connection is not None:
            self._connection.lose(self._process)
            self._connection = None

    def _one_request(self, method: str, write: Any, read: Any) -> Any:
        codecs = (write or bytes, read or bytes)

        def begin(request: Any, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = Call(self, method, codecs, timeout, metadata)
            if call._stream is not None:
                up = call._stream.up
                up.post(Item("message", codecs[0](request)))
                up.post(Item("half_close"))
                call.may_be_repeated(codecs[0](request))
            return call

        return begin

"""The server's side of a simulated RPC: handlers of the code under test, called as grpc.aio calls them."""

import asyncio
import inspect
from dataclasses import dataclass
from typing import Any

import grpc
from grpc.aio import AbortError

from router.streams import EOF
from rpc.interceptors import CallGuard
from tests.simulation.channel import Stream
from tests.simulation.loop import Process
from tests.simulation.wires import Item, Network


@dataclass(frozen=True, slots=True)
class CallDetails:
    """What a generic handler and an interceptor are asked with."""

    method: str
    invocation_metadata: Any


class Server:
    """What `add_to` gets."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.guard = CallGuard()
        self._handlers: list[Any] = []
        self.open: set[Serving] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As grpc.aio.Server."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """As grpc.aio.Server; the generic handlers do."""

    async def find(self, details: CallDetails) -> Any:
        """The handler of a method, None when nobody has it."""
        return next((found for one in self._handlers if (found := one.service(details)) is not None), None)


class Serving:
    """One RPC at its server; also the servicer's context."""

    def __init__(self, server: Server, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._write_bytes: Any = None
        self._read_bytes: Any = None
        self._status: Any = None
        self._gone = False
        self._closed = False
        self._ended_here = False
        self._timer: asyncio.TimerHandle | None = None
        stream.up.noticed = self._noticed

    # the context

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the reader is too far behind."""
        data = self._write_bytes(message) if self._write_bytes is not None else message
        await self._stream.down.send(data)
        await asyncio.sleep(0)

    async def read(self) -> Any:
        """The next message of the client, or EOF."""
        item = await self._stream.up.take()
        if item is None or item.kind != "message":
            return EOF
        return self._read_bytes(item.value) if self._read_bytes is not None else item.value

    def __aiter__(self) -> "Serving":
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, None without one."""
        deadline = self._stream.deadline
        return None if deadline is None else max(0.0, deadline - self._server.network.loop.time())

    def invocation_metadata(self) -> Any:
        """The client's."""
        return self._stream.metadata

    async def abort_with_status(self, status: Any) -> None:
        """Ends the call with it. Never returns."""
        self._status = (status.code, status.details, tuple(status.trailing_metadata or ()))
        raise AbortError

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nobody of the simulated reads it."""
        await asyncio.sleep(0)

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Nobody of the simulated reads it."""

    def code(self) -> Any:
        """The status so far."""
        return None if self._status is None else self._status[0]

    def done(self) -> bool:
        """Whether the call is over."""
        return self._gone or (self._task is not None and self._task.done())

    cancelled = done

    # its way

    def _noticed(self, item: Item) -> bool:
        process = self._server.process
        if item.kind == "open":
            self._server.network.loop.call_soon(self._start, context=process.context)
            return True
        if item.kind == "reset":
            self.client_left()
            return True
        return False

    def client_left(self) -> None:
        """The client, or the way to it, is gone; the process learns it when it runs."""
        self._server.network.loop.call_soon(self._leave, context=self._server.process.context)

    def _leave(self) -> None:
        if self._gone:
            return
        self._gone = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
        self._close()

    def _time_over(self) -> None:
        """The client's deadline has passed: the server ends the call, whether the client is there or not."""
        if not self._gone and (self._task is None or not self._task.done()):
            self._stream.down.post(Item("end", (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())))
            self._ended_here = True
            self._leave()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stream.up.close()
        if self._gone and not self._ended_here:
            self._stream.down.close()
        self._server.open.discard(self)
        if not self._closed:
            self._closed = True
            self._stream.over()

    def _start(self) -> None:
        if self._gone:
            return
        loop, process = self._server.network.loop, self._server.process
        self._server.open.add(self)
        if self._stream.deadline is not None:
            self._timer = loop.call_later(max(0.0, self._stream.deadline - loop.time()), self._time_over)
        self._task = loop.create_task(self._run(), context=process.context.copy())

    async def _run(self) -> None:
        details = CallDetails(self._stream.method, self._stream.metadata)
        try:
            handler = await self._server.guard.intercept_service(self._server.find, details)
            if handler is None:
                self._status = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
                return
            await self._handle(handler)
            self._status = self._status or (grpc.StatusCode.OK, "", ())
        except AbortError:
            pass
        except asyncio.CancelledError:
            self._status = (grpc.StatusCode.CANCELLED, "cancelled by the server", ())
            raise
        finally:
            if not self._gone:
                self._stream.down.post(Item("end", self._status or (grpc.StatusCode.UNKNOWN, "a handler failed", ())))
            self._close()

    async def _handle(self, handler: Any) -> None:
        self._write_bytes, self._read_bytes = handler.response_serializer, handler.request_deserializer
        request = self if handler.request_streaming else await self.read()
        if request is EOF:  # the client left before its message came
            self._gone = True
            return
        if handler.response_streaming:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            answer = behaviour(request, self)
            if inspect.isasyncgen(answer):
                async for message in answer:
                    await self.write(message)
            else:
                await answer
            return
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await self.write(await behaviour(request, self))

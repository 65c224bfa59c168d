"""What stands around every handler of a server: nothing but a typed status leaves it, and its end is counted.

A handler keeps its kind (coroutine or asynchronous generator), because gRPC treats the two differently.
"""

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc.status import StatusError, Violation, abort, internal, invalid_argument
from telemetry import logs, tracing

#: Told at the end of each call: method ("package.Service/Method"), name of the status code, seconds.
Ended = Callable[[str, str, float], None]
#: Asked at the start of each call, before its request is looked at; raises StatusError to refuse it.
Admit = Callable[[str, Any], Awaitable[None]]

Handler = Any
_Details = Any
_Context = Any

#: Most handlers whose wrapped form is kept: more than that comes from a handler that takes any method's name.
MAX_KEPT = 1000

#: A call that ends that shortly before its deadline, in seconds, ended because of it.
DEADLINE_MARGIN_S = 0.05

_LOG = logging.getLogger("rpc")


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Sends StatusError as it is, hides every other exception behind INTERNAL, and refuses what `admit` refuses.

    The log gets the exception with the request's id; the client gets the id alone. A message that cannot be decoded is
    the client's error. `ended` hears of every call of a known method.
    """

    def __init__(self, ended: Ended | None = None, admit: Admit | None = None) -> None:
        self._ended = ended
        self._admit = admit
        self._kept: dict[str, tuple[Handler, Handler]] = {}
        self._in_flight: Counter[str] = Counter()

    def in_flight(self) -> dict[str, int]:
        """Calls being handled now, by method."""
        return {method: count for method, count in self._in_flight.items() if count}

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[Handler]], handler_call_details: _Details
    ) -> Handler:
        """The handler with the guard around it; None, as it came, for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.lstrip("/")
        kept = self._kept.get(method)
        if kept is not None and kept[0] is handler:
            return kept[1]
        guarded = self._guarded(method, handler)
        if len(self._kept) < MAX_KEPT:
            self._kept[method] = (handler, guarded)
        return guarded

    def _guarded(self, method: str, handler: Handler) -> Handler:
        one_request, one_response = not handler.request_streaming, not handler.response_streaming
        behaviour = (
            (handler.unary_unary if one_response else handler.unary_stream)
            if one_request
            else (handler.stream_unary if one_response else handler.stream_stream)
        )
        make = {
            (True, True): grpc.unary_unary_rpc_method_handler,
            (True, False): grpc.unary_stream_rpc_method_handler,
            (False, True): grpc.stream_unary_rpc_method_handler,
            (False, False): grpc.stream_stream_rpc_method_handler,
        }[one_request, one_response]
        read = _reader(handler.request_deserializer, one_request)
        write = handler.response_serializer
        if inspect.isasyncgenfunction(behaviour):
            return make(self._around_generator(method, behaviour, write), read, None)
        if not inspect.iscoroutinefunction(behaviour):
            raise TypeError(f"the handler of {method} is not asynchronous; it would block a thread for each call")
        if one_response:
            return make(self._around_coroutine(method, behaviour, write), read, None)
        return make(self._around_coroutine(method, behaviour, None), read, write)

    def _around_coroutine(self, method: str, behaviour: Any, write: Any) -> Any:
        async def guarded(request: Any, context: _Context) -> Any:
            with self._call(method, context) as end:
                try:
                    await self._begin(method, request, context)
                    response = await behaviour(request, context)
                    # Here rather than in gRPC, which would tell the client what went wrong.
                    return write(response) if write is not None else response
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (top of an RPC)
                    await end(error)

        return guarded

    def _around_generator(self, method: str, behaviour: Any, write: Any) -> Any:
        async def guarded(request: Any, context: _Context) -> AsyncIterator[Any]:
            with self._call(method, context) as end:
                try:
                    await self._begin(method, request, context)
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            yield write(response) if write is not None else response
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (top of an RPC)
                    await end(error)

        return guarded

    async def _begin(self, method: str, request: Any, context: _Context) -> None:
        logs.bind(_request_id(request), traceparent=tracing.traceparent_from_metadata(context.invocation_metadata()))
        if self._admit is not None:
            await self._admit(method, context)
        if isinstance(request, StatusError):
            raise request

    @contextmanager
    def _call(self, method: str, context: _Context) -> Iterator[Callable[[BaseException], Awaitable[None]]]:
        started_at = time.monotonic()
        self._in_flight[method] += 1
        code = "OK"

        async def end(error: BaseException) -> None:
            nonlocal code
            code = "CANCELLED"  # until the status is on its way the client may be gone
            await _send(method, context, error)

        try:
            yield end
        except (asyncio.CancelledError, GeneratorExit):
            code = why_gone(context)
            raise
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except grpc.aio.BaseError as gone:  # the transport's: a message that nobody is left to take
            code = why_gone(context)
            # As it is, gRPC would log it as an error of ours whenever a client leaves at the wrong moment.
            raise asyncio.CancelledError from gone
        else:
            code = _code(context)
        finally:
            self._in_flight[method] -= 1
            if self._ended is not None:
                self._ended(method, code, time.monotonic() - started_at)


async def _send(method: str, context: _Context, error: BaseException) -> None:
    """End the call with `error`, if there is still somebody to tell. Always raises."""
    if _is_end(context, error):
        raise error
    if isinstance(error, StatusError):
        await abort(context, error)
    request_id = logs.current().request_id
    _LOG.error("%s failed", method, exc_info=error, extra={"rpc_method": method})
    await abort(context, internal(request_id))


def _is_end(context: _Context, error: BaseException) -> bool:
    """Whether `error` says that the call is over, rather than that something went wrong in it."""
    if isinstance(error, asyncio.CancelledError):
        # One that nobody sent to this task leaked out of something it awaited. gRPC would leave the client waiting.
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, grpc.aio.UsageError):
        return bool(context.done())
    return isinstance(error, grpc.aio.BaseError)


def _reader(read: Any, one_request: bool) -> Any:
    """A deserializer whose failure becomes INVALID_ARGUMENT.

    With one request it returns the error, for nothing of ours is on the stack yet; with a stream of them it raises inside
    the handler's read.
    """
    if read is None:
        return None

    def guarded(data: bytes) -> Any:
        try:
            return read(data)
        except (DecodeError, ValueError):
            text = "the message is not a valid one of its type; text fields must be UTF-8"
            error = invalid_argument([Violation("", text, "MALFORMED_MESSAGE")], "MALFORMED_MESSAGE")
        if one_request:
            return error
        raise error

    return guarded


def _request_id(request: Any) -> str | None:
    """The id that a message carries, by the names that our messages use."""
    found = getattr(request, "request_id", None) or getattr(getattr(request, "key", None), "request_id", None)
    return found if isinstance(found, str) else None


def _code(context: _Context) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "OK"


def why_gone(context: _Context) -> str:
    """ "DEADLINE_EXCEEDED" or "CANCELLED": what made the client's end of the call go away; `cancelled()` cannot tell.

    A client's own clock runs out a little before ours and reaches us as a reset, hence the margin.
    """
    remaining_s = context.time_remaining()
    return "DEADLINE_EXCEEDED" if remaining_s is not None and remaining_s <= DEADLINE_MARGIN_S else "CANCELLED"

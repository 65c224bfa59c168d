"""The guard around handlers, on a real server, for every kind of handler."""

import asyncio
import json
import logging

import grpc
import pytest

from rpc.channels import internal_channel, server_options
from rpc.interceptors import CallGuard
from rpc.status import Violation, abort, details_from, invalid_argument, unavailable
from telemetry import logs
from tests.waiting import until

SECRET = "secret internals"
KINDS = ("unary", "write", "yield", "stream_unary", "stream_write", "stream_yield")


class Message:
    """What our handlers get: something with a request id."""

    def __init__(self, what, request_id=""):
        self.what = what
        self.request_id = request_id


def read(data):
    fields = json.loads(data.decode())
    return Message(fields["what"], fields.get("request_id", ""))


def write(answer):
    return answer.text.encode()


class Answer:
    """What our handlers give."""

    def __init__(self, text):
        self.text = text


def ask(what, request_id="r1"):
    return json.dumps({"what": what, "request_id": request_id}).encode()


class Handlers:
    """One handler of each kind; what they do is in the first request."""

    def __init__(self):
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.stopped_by = None
        self.request_id = None

    async def act(self, message, context):
        logs.bind(request_id=message.request_id)
        if message.what == "raise":
            raise ValueError(SECRET)
        if message.what == "status":
            raise invalid_argument([Violation("x", "must be over 0")])
        if message.what == "abort":
            await abort(context, unavailable("not now", "BUSY", retry_after_s=2))
        if message.what == "leak":
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner
        if message.what == "wait":
            self.entered.set()
            try:
                await asyncio.Event().wait()
            except BaseException as stopped:
                self.stopped_by = stopped
                raise
            finally:
                self.left.set()

    async def unary(self, message, context):
        await self.act(message, context)
        return self.answer(message)

    async def write(self, message, context):
        await context.write(Answer("one"))
        await self.act(message, context)
        await context.write(self.answer(message))

    async def yield_(self, message, context):
        yield Answer("one")
        await self.act(message, context)
        yield self.answer(message)

    async def stream_unary(self, messages, context):
        async for message in messages:
            await self.act(message, context)
        return self.answer(message)

    async def stream_write(self, messages, context):
        await context.write(Answer("one"))
        while (message := await context.read()) is not grpc.aio.EOF:
            await self.act(message, context)
            await context.write(self.answer(message))

    async def stream_yield(self, messages, context):
        yield Answer("one")
        async for message in messages:
            await self.act(message, context)
            yield self.answer(message)

    def answer(self, message):
        return None if message.what == "unserializable" else Answer(message.what)


class Served:
    """A server with the guard, and a client."""

    async def __aenter__(self):
        self.handlers = Handlers()
        self.refusal = None
        self.ended = []
        self.one_ended = asyncio.Event()
        self.guard = CallGuard(self.on_end, self.admit)
        self.server = grpc.aio.server(interceptors=[self.guard], options=server_options())
        of = self.handlers
        methods = {
            "unary": grpc.unary_unary_rpc_method_handler(of.unary, read, write),
            "write": grpc.unary_stream_rpc_method_handler(of.write, read, write),
            "yield": grpc.unary_stream_rpc_method_handler(of.yield_, read, write),
            "stream_unary": grpc.stream_unary_rpc_method_handler(of.stream_unary, read, write),
            "stream_write": grpc.stream_stream_rpc_method_handler(of.stream_write, read, write),
            "stream_yield": grpc.stream_stream_rpc_method_handler(of.stream_yield, read, write),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Kinds", methods),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = internal_channel(f"127.0.0.1:{port}")
        return self

    async def admit(self, method, context):
        if self.refusal is not None:
            raise self.refusal

    async def __aexit__(self, *exc):
        await self.channel.close()
        await self.server.stop(0)

    def on_end(self, method, code, duration_s):
        self.ended.append((method, code))
        assert duration_s >= 0
        self.one_ended.set()

    def call(self, kind, *payloads, **options):
        path = f"/test.Kinds/{kind}"
        if kind == "unary":
            return self.channel.unary_unary(path)(payloads[0], **options)
        if kind in ("write", "yield"):
            return self.channel.unary_stream(path)(payloads[0], **options)
        if kind == "stream_unary":
            return self.channel.stream_unary(path)(iter(payloads), **options)
        return self.channel.stream_stream(path)(iter(payloads), **options)

    async def answers(self, kind, *payloads, **options):
        call = self.call(kind, *payloads, **options)
        if kind in ("unary", "stream_unary"):
            return [(await call).decode()]
        return [answer.decode() async for answer in call]

    async def noted(self, calls):
        """Which calls ended with an error, as the guard notes it: after the client has been told."""

        async def there():
            return self.ended == calls

        await until(there, 10.0, f"{calls} are noted")

    async def failure(self, kind, *payloads, **options):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.answers(kind, *payloads, **options)
        return details_from(failed.value)


@pytest.fixture
async def served():
    async with Served() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass(served, kind):
    expected = ["hello"] if kind in ("unary", "stream_unary") else ["one", "hello"]
    assert await served.answers(kind, ask("hello")) == expected
    await served.noted([(f"test.Kinds/{kind}", "OK")])
    assert served.guard.in_flight() == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_without_its_text_and_logged_with_the_request(served, kind, caplog):
    with caplog.at_level(logging.ERROR):
        found = await served.failure(kind, ask("raise"))
    assert (found.code, found.message, found.reason) == (grpc.StatusCode.INTERNAL, "internal error", "INTERNAL")
    assert found.request_id == "r1"
    await served.noted([(f"test.Kinds/{kind}", "INTERNAL")])
    (record,) = (record for record in caplog.records if record.name == "rpc")
    assert SECRET in str(record.exc_info[1]) and kind in record.getMessage()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_status_is_sent_as_it_is(served, kind):
    found = await served.failure(kind, ask("status"))
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT
    assert found.violations == (Violation("x", "must be over 0"),)
    await served.noted([(f"test.Kinds/{kind}", "INVALID_ARGUMENT")])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_may_abort_by_itself(served, kind, caplog):
    found = await served.failure(kind, ask("abort"))
    assert (found.code, found.reason, found.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, "BUSY", 2)
    await served.noted([(f"test.Kinds/{kind}", "UNAVAILABLE")])
    assert caplog.records == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_that_leaks_out_of_the_handler_does_not_leave_the_client_waiting(served, kind):
    found = await served.failure(kind, ask("leak"), timeout=20)
    assert found.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_cannot_be_written_is_internal(served, kind):
    found = await served.failure(kind, ask("unserializable"))
    assert (found.code, found.message) == (grpc.StatusCode.INTERNAL, "internal error")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"not json"])
async def test_a_message_that_cannot_be_read_is_the_clients_error(served, kind, garbage):
    found = await served.failure(kind, garbage)
    assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert "UTF-8" in found.message
    await served.noted([(f"test.Kinds/{kind}", "INVALID_ARGUMENT")])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_may_be_refused_before_its_handler(served, kind):
    served.refusal = unavailable("loading", "LOADING")
    found = await served.failure(kind, ask("hello"))
    assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    served.refusal = None
    assert await served.answers(kind, ask("hello"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_reaches_the_handler(served, kind, caplog):
    call = served.call(kind, ask("wait"))
    await asyncio.wait_for(served.handlers.entered.wait(), 10) if kind == "unary" else await first(served, call, kind)
    call.cancel()
    await asyncio.wait_for(served.handlers.left.wait(), 10)
    assert isinstance(served.handlers.stopped_by, asyncio.CancelledError)
    await ended(served)
    await served.noted([(f"test.Kinds/{kind}", "CANCELLED")])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_is_told_apart_from_a_cancel(served, kind):
    found = await served.failure(kind, ask("wait"), timeout=1.0)
    assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await ended(served)
    await served.noted([(f"test.Kinds/{kind}", "DEADLINE_EXCEEDED")])


async def test_a_generator_that_waits_for_its_reader_is_closed(served):
    """Cancelled while suspended in `yield`: the handler sees GeneratorExit, and its finally runs at once."""
    closed = asyncio.Event()

    async def endless(message, context):
        try:
            while True:
                yield Answer("x" * 60_000)
        finally:
            closed.set()

    handler = grpc.unary_stream_rpc_method_handler(endless, read, write)
    served.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.More", {"endless": handler}),))
    call = served.channel.unary_stream("/test.More/endless")(ask("go"))
    await call.read()
    call.cancel()
    await asyncio.wait_for(closed.wait(), 10)
    await ended(served)
    await served.noted([("test.More/endless", "CANCELLED")])


async def test_a_writer_that_waits_for_its_reader_ends_with_the_call(served, caplog):
    """Blocked in `context.write` at the cancel: the handler sees the transport's error, which is no bug."""
    seen = asyncio.get_running_loop().create_future()

    async def endless(message, context):
        try:
            while True:
                await context.write(Answer("x" * 60_000))
        except BaseException as stopped:
            seen.set_result(type(stopped).__name__)
            raise

    handler = grpc.unary_stream_rpc_method_handler(endless, read, write)
    served.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.More", {"endless": handler}),))
    call = served.channel.unary_stream("/test.More/endless")(ask("go"))
    await call.read()
    call.cancel()
    assert await asyncio.wait_for(seen, 10) in ("ExecuteBatchError", "CancelledError")
    await ended(served)
    await served.noted([("test.More/endless", "CANCELLED")])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_method_that_nobody_serves_is_not_counted(served):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await served.channel.unary_unary("/test.Kinds/nothing")(b"")
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert served.ended == []


async def test_calls_in_flight_are_known(served):
    call = served.call("unary", ask("wait"))
    await asyncio.wait_for(served.handlers.entered.wait(), 10)
    assert served.guard.in_flight() == {"test.Kinds/unary": 1}
    call.cancel()
    await ended(served)
    assert served.guard.in_flight() == {}


async def first(served, call, kind):
    if kind != "stream_unary":
        await call.read()
    await asyncio.wait_for(served.handlers.entered.wait(), 10)


async def ended(served):
    """Wait until a call has ended."""
    await asyncio.wait_for(served.one_ended.wait(), 10)

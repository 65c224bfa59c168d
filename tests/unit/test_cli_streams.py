"""`tandem generate --detach` and `tandem attach`: what they print, ask and end with, against a router that plays a script."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from rpc.status import Resource, StatusError, abort, internal, not_found, out_of_range, resource_exhausted
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.exits import Exit, Failure
from tandem_cli.generate import attach, generate
from tandem_cli.printer import Printer
from tests.waiting import until

WAIT_S = 10.0
USAGE = pb.Usage(prompt_tokens=4, selected_tokens=3, processed_tokens=7, returned_tokens=3, billed_tokens=7)


def ended(reason: int = pb.FINISH_REASON_EOS, **changes: object) -> dict[str, Any]:
    return {"completed": pb.Completed(finish_reason=reason, state=pb.REQUEST_STATE_FINISHED, usage=USAGE, **changes)}


def events(*last: dict[str, Any], first_no: int = 0) -> list[pb.GenerateResponse]:
    """Started, "Hel", "lo", and what else is wanted, numbered, from `first_no` on."""
    found: list[dict[str, Any]] = [{"started": pb.Started(request_id="r-1", prompt_tokens=4)}]
    found += [{"delta": pb.Delta(text=text, token_ids=[1])} for text in ("Hel", "lo")]
    return [pb.GenerateResponse(sequence_no=number, **event) for number, event in enumerate([*found, *last])][first_no:]


@dataclass
class ScriptedRouter(pb_grpc.InferenceServiceServicer):
    """Plays one stream to whoever calls Generate or Attach, then fails, ends or stands still; keeps what it was asked."""

    stream: Sequence[pb.GenerateResponse] = ()
    failure: StatusError | None = None
    stands_still: bool = False
    asked: list[Any] = field(default_factory=list)
    cancels: list[pb.CancelRequest] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802  (gRPC's name)
        async for event in self._play(request, context):
            yield event

    async def Attach(self, request: pb.AttachRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802  (gRPC's name)
        async for event in self._play(request, context):
            yield event

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802  (gRPC's name)
        self.cancels.append(request)
        return pb.CancelResponse(outcome=pb.CANCEL_OUTCOME_ACCEPTED)

    async def _play(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append(request)
        for event in self.stream:
            yield event
        if self.stands_still:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if self.failure is not None:
            await abort(context, self.failure)


@asynccontextmanager
async def serving(router: ScriptedRouter) -> AsyncIterator[str]:
    """The address that a router answers at."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def detached(router: ScriptedRouter, *, as_json: bool = False, quiet: bool = False) -> Exit:
    request = pb.GenerateRequest(request_id="r-1", text="Hello?", on_disconnect=pb.ON_DISCONNECT_DETACH)
    async with serving(router) as address:
        return await asyncio.wait_for(generate(address, request, Printer(as_json, quiet)), WAIT_S)


async def attached(router: ScriptedRouter, from_no: int = 0, *, as_json: bool = False, quiet: bool = False) -> Exit:
    request = pb.AttachRequest(request_id="r-1", next_sequence_no=from_no)
    async with serving(router) as address:
        return await asyncio.wait_for(attach(address, request, Printer(as_json, quiet)), WAIT_S)


async def test_attach_prints_what_it_is_given_and_asks_from_where_it_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    router = ScriptedRouter(events(ended(), first_no=2))
    assert await attached(router, 2) is Exit.OK
    assert router.asked == [pb.AttachRequest(request_id="r-1", next_sequence_no=2)]
    told = capsys.readouterr()
    assert told.out == "lo\n"
    assert "eos" in told.err and "r-1" in told.err and "returned 3" in told.err


async def test_a_detached_request_asks_to_run_on_and_reads_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    router = ScriptedRouter(events(ended()))
    assert await detached(router, quiet=True) is Exit.OK
    assert [request.on_disconnect for request in router.asked] == [pb.ON_DISCONNECT_DETACH]
    assert capsys.readouterr() == ("Hello\n", "")


async def test_json_lines_keep_the_numbers_that_attach_goes_on_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert await attached(ScriptedRouter(events(ended(), first_no=1)), 1, as_json=True) is Exit.OK
    told = capsys.readouterr()
    assert [json.loads(line)["sequence_no"] for line in told.out.splitlines()] == ["1", "2", "3"] and told.err == ""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (not_found(Resource("request", "r-1"), "UNKNOWN_REQUEST"), Exit.NOT_FOUND, "no request named 'r-1'"),
        (out_of_range("events before 4 are not kept any more", "REPLAY_GONE"), Exit.NOT_FOUND, "events before 4 are not kept"),
        (resource_exhausted("2 readers", "TOO_MANY_READERS", retry_after_s=1.0), Exit.REFUSED, "Try again in 1 s."),
    ],
)
async def test_attach_to_what_can_not_be_read(
    failure: StatusError, code: Exit, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Failure, match=re.escape(words)) as raised:
        await attached(ScriptedRouter(failure=failure))
    assert raised.value.code is code
    assert raised.value.as_dict()["error"]["reason"] == failure.reason
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("run", [attached, detached])
async def test_a_request_that_failed_shows_its_text_and_how_it_ended(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failed = ended(pb.FINISH_REASON_MODEL_ERROR, cause="model_error")
    assert await run(ScriptedRouter(events(failed), internal("r-1")), quiet=True) is Exit.FAILED
    assert capsys.readouterr() == ("Hello\n", "tandem: r-1 ended with model_error (model_error)\n")


async def test_a_stream_that_breaks_off_is_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    gone = out_of_range("events before 9 are not kept any more", "REPLAY_GONE")
    with pytest.raises(Failure, match="events before 9"):
        await attached(ScriptedRouter(events(), gone), quiet=True)
    with pytest.raises(Failure, match="ended without its last event") as raised:
        await attached(ScriptedRouter(events()), quiet=True)
    assert raised.value.code is Exit.FAILED
    assert capsys.readouterr().out == "HelloHello"


async def test_nothing_is_left_to_read_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A router answers so when the wanted event is the one after the last."""
    assert await attached(ScriptedRouter(), 4) is Exit.OK
    told = capsys.readouterr()
    assert "nothing is left to read; tandem get r-1 tells how it ended" in told.err and told.out == ""
    with pytest.raises(Failure, match="ended without its last event"):
        await attached(ScriptedRouter())


@pytest.mark.parametrize(("number", "run", "read"), [(signal.SIGINT, detached, 3), (signal.SIGTERM, attached, 3)])
async def test_a_signal_leaves_the_stream_and_cancels_nothing(
    number: int, run: Any, read: int, capsys: pytest.CaptureFixture[str]
) -> None:
    router, before, out = ScriptedRouter(events(), stands_still=True), signal.getsignal(number), list[str]()
    reading = asyncio.create_task(run(router))

    async def shown() -> bool:
        out.append(capsys.readouterr().out)
        return "".join(out) == "Hello"

    await until(shown, WAIT_S, "the text")
    os.kill(os.getpid(), number)
    assert await reading is Exit.CANCELLED
    await asyncio.wait_for(router.left.wait(), WAIT_S)
    told = capsys.readouterr()
    assert told.err.strip() == f"left; to go on reading: tandem attach r-1 --from {read}" and told.out == ""
    assert router.cancels == []
    assert signal.getsignal(number) == before


async def test_a_stream_that_is_left_before_it_brought_anything_goes_on_where_it_was_asked_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    router = ScriptedRouter(stands_still=True)
    reading = asyncio.create_task(attached(router, 7))

    async def asked() -> bool:
        return bool(router.asked)

    await until(asked, WAIT_S, "the call")
    os.kill(os.getpid(), signal.SIGINT)
    assert await reading is Exit.CANCELLED
    assert "tandem attach r-1 --from 7" in capsys.readouterr().err


@pytest.mark.slow
async def test_the_command_itself() -> None:
    """Options become fields, failures become exit statuses, Ctrl-C leaves: in a process of its own."""
    whole, unknown = ScriptedRouter(events(ended())), ScriptedRouter(failure=not_found(Resource("request", "r-9")))
    async with serving(whole) as there, serving(unknown) as elsewhere:
        ran = await asyncio.gather(
            _command("generate", "--detach", "--request-id", "r-1", "-q", "--address", there, "Hello?"),
            _command("attach", "r-1", "--from", "2", "-q", "--address", there),
            _command("attach", "r-9", "--json", "--address", elsewhere),
            _command("attach", "r-1", "--from", "-1", "--address", there),
            _command("attach", "r-1", "--address", "127.0.0.1:1"),
        )
    assert [code for code, _, _ in ran] == [Exit.OK, Exit.OK, Exit.NOT_FOUND, Exit.BAD_INPUT, Exit.UNREACHABLE]
    assert ran[0][1] == ran[1][1] == "Hello\n"
    assert json.loads(ran[2][1])["error"]["exit_code"] == Exit.NOT_FOUND and ran[2][2] == ""
    assert "next_sequence_no: -1 is out of the range" in ran[3][2]
    assert {type(request).__name__ for request in whole.asked} == {"GenerateRequest", "AttachRequest"}
    for request in whole.asked:
        if isinstance(request, pb.GenerateRequest):
            assert (request.request_id, request.on_disconnect) == ("r-1", pb.ON_DISCONNECT_DETACH)
        else:
            assert request.next_sequence_no == 2


async def _command(*arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tandem_cli", *arguments, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 3 * WAIT_S)
    return process.returncode, out.decode(), err.decode()

"""One request from the command line: stream it, show where it is, cancel it on Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.client import connect, failure_of
from tandem_cli.exits import Exit, Failure
from tandem_cli.printer import Printer

STATE_POLL_S = 0.25
STATE_TIMEOUT_S = 2.0
CANCEL_TIMEOUT_S = 10.0
#: The router ends a request at its time limit and says so; a router that does not is given up that much later.
DEADLINE_GRACE_S = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_WORDS = {
    pb.REQUEST_STATE_CREATED: "arriving",
    pb.REQUEST_STATE_QUEUED: "waiting for budget",
    pb.REQUEST_STATE_ADMITTED: "asking for a seat",
    pb.REQUEST_STATE_PREFILLING: "computing the prompt",
    pb.REQUEST_STATE_DECODING: "generating",
    pb.REQUEST_STATE_DRAINING: "sending the rest",
    pb.REQUEST_STATE_CANCEL_REQUESTED: "cancelling",
}


@dataclass(slots=True)
class Seen:
    """What one stream has brought so far."""

    started_at: float = field(default_factory=time.monotonic)
    first_delta_at: float = 0.0
    tokens: int = 0
    next_no: int = 0
    started: pb.Started | None = None
    completed: pb.Completed | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        """Note one event."""
        kind = response.WhichOneof("event")
        self.next_no = response.sequence_no + 1
        if kind == "started":
            self.started = response.started
        elif kind == "delta":
            self.first_delta_at = self.first_delta_at or time.monotonic()
            self.tokens += len(response.delta.token_ids)
        elif kind == "choice_ended":
            self.first_delta_at = self.first_delta_at or time.monotonic()
            self.tokens += len(response.choice_ended.token_ids)
        elif kind == "completed":
            self.completed = response.completed

    def words(self, record: pb.RequestRecord | None) -> str:
        """Where the request is, for people; `record` as far as it is known."""
        now = time.monotonic()
        state = _WORDS.get(record.state, "ending") if record is not None else "connecting"
        prompt = f", prompt of {self.started.prompt_tokens} tokens" if self.started is not None else ""
        if self.tokens > 1:
            rate = f"{(self.tokens - 1) / (now - self.first_delta_at):.1f} tokens/s"
            return f"generating: {self.tokens} tokens, {rate}{prompt}"
        count = record.usage.selected_tokens if record is not None else 0
        return f"{state}{f': {count} tokens' if count else ''}{prompt}  {now - self.started_at:.1f} s"


async def generate(address: str, request: pb.GenerateRequest, printer: Printer, timeout_s: float | None = None) -> Exit:
    """Run one request to its end. Raises Failure when it ends without its last event.

    The first Ctrl-C (or SIGTERM) cancels the request and its end is still shown; the second quits at once. A request that
    runs on without its client is only left.
    `timeout_s` limits the whole request.
    """
    if timeout_s is not None:
        request.deadlines.overall.FromNanoseconds(int(timeout_s * 1e9))
    async with connect(address) as stub:
        detached = request.on_disconnect == pb.ON_DISCONNECT_DETACH
        call_s = timeout_s + DEADLINE_GRACE_S if timeout_s is not None else None
        call = stub.Generate(request, timeout=call_s)
        return await _Run(address, stub, call, request.request_id, printer, leaves=detached).to_its_end()


async def attach(address: str, request: pb.AttachRequest, printer: Printer) -> Exit:
    """Take up the stream of a request to its end. Raises Failure as `generate` does. Ctrl-C leaves the stream."""
    async with connect(address) as stub:
        call = stub.Attach(request)
        return await _Run(
            address, stub, call, request.request_id, printer, leaves=True, next_no=request.next_sequence_no
        ).to_its_end()


class _Run:
    """One stream that is being read; `leaves`: an interrupt leaves it instead of cancelling the request."""

    def __init__(
        self,
        address: str,
        stub: pb_grpc.InferenceServiceStub,
        call: Any,
        request_id: str,
        printer: Printer,
        *,
        leaves: bool,
        next_no: int = 0,
    ) -> None:
        self._address, self._stub, self._call = address, stub, call
        self._request_id, self._printer = request_id, printer
        self._seen, self._from_no = Seen(next_no=next_no), next_no
        self._cancel: asyncio.Task[None] | None = None
        self._leaves = leaves
        self._left = False

    async def to_its_end(self) -> Exit:
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._interrupted)
        watcher = asyncio.create_task(self._watch())
        try:
            return await self._read()
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            self._call.cancel()
            for task in (watcher, self._cancel):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            self._printer.settle()

    async def _read(self) -> Exit:
        status = grpc.StatusCode.OK
        try:
            async for response in self._call:
                self._seen.take(response)
                self._printer.event(response)
        except grpc.aio.AioRpcError as error:
            self._printer.settle()
            if self._seen.completed is None:
                raise failure_of(error, self._address, self._seen.started is not None) from None
            status = error.code()
        except asyncio.CancelledError:
            if self._cancel is None and not self._left:
                raise
            return Exit.CANCELLED  # by the second Ctrl-C, or the first one when the request runs on
        except BrokenPipeError:
            # Whatever is flushed later must not fail again. Leaving the stream cancels the request.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.PIPE_CLOSED
        completed = self._seen.completed
        if completed is None and self._seen.next_no == self._from_no > 0:
            self._printer.note(f"nothing is left to read; tandem get {self._request_id} tells how it ended")
            return Exit.OK
        if completed is None:
            raise Failure(Exit.FAILED, f"the stream of {self._request_id} ended without its last event")
        code = exit_of(completed, status)
        self._printer.summary(self._request_id, completed, code)
        return code

    async def _watch(self) -> None:
        """Shows where the request is, as its record says."""
        while self._printer.shows_progress:
            record = None
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await self._stub.Get(pb.GetRequest(request_id=self._request_id), timeout=STATE_TIMEOUT_S)
                record = answer.record
            if not self._printer.shows_progress:
                return
            self._printer.progress(f"{self._request_id}  {self._seen.words(record)}")
            await asyncio.sleep(STATE_POLL_S)

    def _interrupted(self) -> None:
        if self._leaves:
            self._left = True
            self._printer.note(f"left; to go on reading: tandem attach {self._request_id} --from {self._seen.next_no}")
            self._call.cancel()
            return
        if self._cancel is not None:
            self._call.cancel()
            return
        self._printer.note("cancelling; Ctrl-C again quits at once")
        self._cancel = asyncio.create_task(self._send_cancel())

    async def _send_cancel(self) -> None:
        request = pb.CancelRequest(request_id=self._request_id, reason="interrupted at the terminal")
        try:
            await self._stub.Cancel(request, timeout=CANCEL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._printer.note(
                f"the cancel failed ({error.code().name}: {error.details()}); leaving the stream, which cancels too"
            )
            self._call.cancel()


def exit_of(completed: pb.Completed, status: grpc.StatusCode) -> Exit:
    """The exit status of a request that told how it ended."""
    if completed.finish_reason == pb.FINISH_REASON_CANCELLED:
        return Exit.CANCELLED
    if completed.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED:
        return Exit.DEADLINE
    return Exit.OK if status is grpc.StatusCode.OK else Exit.FAILED

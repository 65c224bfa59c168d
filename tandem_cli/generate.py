"""`tandem generate`: stream one answer, show where the request is, cancel it on Ctrl-C."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.client import EXIT, connect, exit_code, explain, label
from tandem_cli.record_view import as_dict, timings_table, usage_line

STATE_POLL_S = 0.25
CANCEL_TIMEOUT_S = 10.0
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
class Shown:
    """What one stream has brought so far."""

    started_at: float = field(default_factory=time.monotonic)
    first_delta_at: float | None = None
    tokens: int = 0
    completed: pb.Completed | None = None
    started: pb.Started | None = None


class Printer:
    """Writes events: text as it comes, or one JSON object a line; progress and figures go to standard error."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True, quiet=quiet or as_json)
        self._live: Live | None = None

    def waiting(self, words: str) -> None:
        """Show what the request waits for, until text comes."""
        if self.as_json or not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        self._live.update(Spinner("dots", text=words))

    def settle(self) -> None:
        """Take the progress display away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, response: pb.GenerateResponse) -> None:
        """Write one event to standard output."""
        kind = response.WhichOneof("event")
        if self.as_json:
            print(json.dumps(as_dict(response), ensure_ascii=False), flush=True)
            return
        text = response.delta.text if kind == "delta" else response.completed.text if kind == "completed" else ""
        if text:
            self.settle()
            sys.stdout.write(text)
            sys.stdout.flush()

    def summary(self, shown: Shown) -> None:
        """Say how it ended and where the time went."""
        self.settle()
        completed = shown.completed
        if completed is None or self.as_json:
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        reason = label(pb.FinishReason, completed.finish_reason)
        matched = f" ({completed.matched_stop!r})" if completed.matched_stop else ""
        cause = f" [{completed.cause}]" if completed.cause else ""
        self.console.print(f"\n[bold]{reason}[/]{matched}{cause}  {usage_line(completed.usage)}", highlight=False)
        if completed.timings.decode_s and completed.usage.selected_tokens > 1:
            rate = (completed.usage.selected_tokens - 1) / completed.timings.decode_s
            self.console.print(f"{rate:,.1f} tokens/s while generating", highlight=False)
        self.console.print(timings_table(completed.timings))


async def generate(address: str, request: pb.GenerateRequest, printer: Printer, timeout_s: float | None) -> int:
    """Run one request to its end; returns the exit status. The first Ctrl-C cancels it, the second quits at once."""
    async with connect(address) as stub:
        shown = Shown()
        call = stub.Generate(request, timeout=timeout_s)
        watcher = asyncio.create_task(_watch_state(stub, request.request_id, printer, shown))
        interrupts = _Interrupts(stub, request.request_id, printer, call)
        interrupts.install()
        try:
            async for response in call:
                _take(response, shown, printer)
            status = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            printer.settle()
            if shown.completed is None:
                print(explain(error, address), file=sys.stderr)
                return exit_code(error)
            status = error.code()
        except asyncio.CancelledError:
            return EXIT.CANCELLED
        finally:
            interrupts.remove()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        printer.summary(shown)
        return _exit_status(status, shown)


def _take(response: pb.GenerateResponse, shown: Shown, printer: Printer) -> None:
    kind = response.WhichOneof("event")
    if kind == "started":
        shown.started = response.started
    elif kind == "delta":
        shown.first_delta_at = shown.first_delta_at or time.monotonic()
        shown.tokens += len(response.delta.token_ids)
    elif kind == "completed":
        shown.completed = response.completed
    printer.event(response)


def _exit_status(status: grpc.StatusCode, shown: Shown) -> int:
    completed = shown.completed
    if completed is None:
        return EXIT.FAILED
    if completed.finish_reason == pb.FINISH_REASON_CANCELLED:
        return EXIT.CANCELLED
    if completed.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED:
        return EXIT.DEADLINE
    return EXIT.OK if status is grpc.StatusCode.OK else EXIT.FAILED


async def _watch_state(stub: pb_grpc.InferenceServiceStub, request_id: str, printer: Printer, shown: Shown) -> None:
    """Until text comes, show the state that the record is in."""
    while shown.first_delta_at is None and shown.completed is None:
        words = "connecting"
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await stub.Get(pb.GetRequest(request_id=request_id), timeout=STATE_POLL_S * 4)
            words = _WORDS.get(answer.record.state, "connecting")
        if shown.first_delta_at is None:
            printer.waiting(f"{words}  {time.monotonic() - shown.started_at:.1f} s")
        await asyncio.sleep(STATE_POLL_S)


class _Interrupts:
    """Ctrl-C: first cancels the request and lets its terminal event come, second ends the program."""

    def __init__(self, stub: pb_grpc.InferenceServiceStub, request_id: str, printer: Printer, call: Any) -> None:
        self._stub, self._request_id, self._printer, self._call = stub, request_id, printer, call
        self._cancel: asyncio.Task[None] | None = None

    def install(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def remove(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if self._cancel is not None:
            self._cancel.cancel()

    def _interrupt(self) -> None:
        if self._cancel is not None:
            self._call.cancel()
            return
        self._printer.settle()
        self._printer.console.print("\n[yellow]cancelling; Ctrl-C again quits at once[/]")
        self._cancel = asyncio.create_task(self._send_cancel())

    async def _send_cancel(self) -> None:
        request = pb.CancelRequest(request_id=self._request_id, reason="interrupted at the terminal")
        try:
            await self._stub.Cancel(request, timeout=CANCEL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._printer.console.print(f"[red]the cancel failed: {error.details()}[/]")
            self._call.cancel()

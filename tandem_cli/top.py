"""`tandem top`: a cell as it looks now, again and again, until q or Ctrl-C."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
from rich.live import Live
from rich.text import Text

from tandem.v1 import cell_pb2, cell_pb2_grpc
from tandem_cli.calls import Address
from tandem_cli.client import DEFAULT_ADDRESS, channel_to, failure_of
from tandem_cli.consoles import output_console
from tandem_cli.exits import Exit, Failure
from tandem_cli.models_commands import AsJson
from tandem_cli.record_view import as_dict
from tandem_cli.top_view import whole

#: Between two tries to reach a router that was there and is gone, in seconds.
RETRY_S = 1.0
#: What reading a stream gives at its end; the stubs of grpc do not know it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def top(
    address: Address = DEFAULT_ADDRESS,
    period_s: Annotated[float, typer.Option("--period", help="Seconds between two views, 0.2 to 60.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Running requests that are listed at most, up to 1000, oldest first.")] = 100,
    ended: Annotated[int, typer.Option(help="Ended requests that are listed at most, up to 200, newest first.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="Show one view and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the cell as it looks now: pools with their pages, queue, budgets, requests. q or Ctrl-C ends it."""
    request = cell_pb2.WatchRequest()
    try:
        request.period.FromNanoseconds(round(period_s * 1e9))
        request.max_requests, request.max_ended = requests, ended
    except (ValueError, OverflowError):
        raise Failure(
            Exit.BAD_INPUT, "--period, --requests and --ended must be 0 or more, and no larger than their limits"
        ) from None
    seen = sys.stdout.isatty() and not (once or as_json)
    run = _show(address, request) if seen else _print(address, request, once=once, as_json=as_json)
    try:
        raise typer.Exit(asyncio.run(run))
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, address) from None
    except BrokenPipeError:
        # Whatever is flushed later must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.PIPE_CLOSED) from None


async def _print(address: str, request: cell_pb2.WatchRequest, *, once: bool, as_json: bool) -> Exit:
    """Views one after the other, for programs and files."""
    console = output_console()
    with _ending_by_signal() as ended:
        async with channel_to(address) as channel:
            call = _watch(channel, request)
            try:
                while (answer := await _next(call, ended)) is not None:
                    if as_json:
                        print(json.dumps(as_dict(answer.view)), flush=True)
                    else:
                        console.print(whole(answer.view))
                        sys.stdout.flush()
                    if once:
                        return Exit.OK
            finally:
                call.cancel()
    if once:
        raise Failure(Exit.CANCELLED, "interrupted before the view came")
    return Exit.OK


async def _show(address: str, request: cell_pb2.WatchRequest) -> Exit:
    """Views on the whole screen. A router that goes is waited for, once it was there."""
    screen: Live | None = None
    last, note = cell_pb2.CellView(), ""

    def draw() -> None:
        if screen is not None:
            screen.update(whole(last, screen.console.size.height, note), refresh=True)

    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(_ending_by_signal(resized=draw))
        async with channel_to(address) as channel:
            while not ended.is_set():
                call = _watch(channel, request)
                try:
                    while (answer := await _next(call, ended)) is not None:
                        if screen is None:
                            stack.enter_context(_keys(ended))
                            screen = stack.enter_context(
                                Live(Text(""), console=output_console(), screen=True, auto_refresh=False)
                            )
                        last, note = answer.view, ""
                        draw()
                except grpc.aio.AioRpcError as error:
                    if screen is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    note = f"no router answers at {address}; trying again"
                    draw()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), RETRY_S)
                finally:
                    call.cancel()
    return Exit.OK


def _watch(channel: grpc.aio.Channel, request: cell_pb2.WatchRequest) -> Any:
    return cell_pb2_grpc.CellServiceStub(channel).Watch(request)


async def _next(call: Any, ended: asyncio.Event) -> Any:
    """The next view; None when the command is to end, or the stream has. Raises AioRpcError."""
    reading = asyncio.ensure_future(call.read())
    leaving = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            return None
        answer = reading.result()
        return None if answer is _EOF else answer
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)


@contextlib.contextmanager
def _ending_by_signal(resized: Callable[[], None] | None = None) -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set; `resized` is called when the terminal has another size."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    actions: dict[signal.Signals, Callable[[], None]] = dict.fromkeys(_STOP_SIGNALS, ended.set)
    if resized is not None:
        actions[signal.SIGWINCH] = resized
    before = {number: signal.getsignal(number) for number in actions}
    for number, action in actions.items():
        loop.add_signal_handler(number, action)
    try:
        yield ended
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Inside, q ends the command: keys come one by one and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed() -> None:
        keys = os.read(stdin, 64)
        if not keys or b"q" in keys.lower():
            ended.set()
            loop.remove_reader(stdin)

    tty.setcbreak(stdin)
    loop.add_reader(stdin, pressed)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)

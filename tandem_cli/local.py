"""Commands that work on this machine: up, demo, models."""

import asyncio
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import models
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell, CellOptions, running_cell
from tandem_cli.cell import Progress as CellProgress
from tandem_cli.client import EXIT, connect
from tandem_cli.generate import Printer, generate
from tandem_cli.record_view import timeline
from tandem_cli.supervisor import StartFailed

WATCH_S = 0.5
DEMO_PROMPT = "Explain in three sentences why a chef prepares ingredients before cooking."
DEMO_OUTPUT_TOKENS = 96

models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
Model = Annotated[str, typer.Option(help="A known name, a .gguf file, a folder with safetensors, or a hub id org/name.")]


def up(
    model: Model = models.DEFAULT_MODEL,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Prefill members; 0: decode members compute prompts.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode members.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Routers; the first takes --listen.")] = 1,
    listen: Annotated[str, typer.Option(help="host:port of the first router; port 0 takes a free one.")] = "127.0.0.1:50051",
    metrics_port: Annotated[int, typer.Option(help="Port of the first router's metrics; 0 takes a free one.")] = 0,
    redis_url: Annotated[str, typer.Option(help="redis://… of a server; empty starts an embedded one.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each member's engine.")] = 1,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="KV memory of each member, in tokens.")] = 65_536,
    transport: Annotated[str, typer.Option(help="How pages travel by NIXL: tcp, or cma (shared memory).")] = "tcp",
    otlp_endpoint: Annotated[str, typer.Option(help="http://host:4317 of a trace collector.")] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print addresses as JSON when ready.")] = False,
) -> None:
    """Start a whole cell on this machine: store, routers, prefill and decode members. Ctrl-C stops it."""
    options = CellOptions(
        model=model,
        dtype=dtype,
        prefill_members=prefill,
        decode_members=decode,
        routers=routers,
        listen=listen,
        metrics_port=metrics_port,
        redis_url=redis_url,
        threads=threads,
        kv_tokens=kv_tokens,
        transport=transport,
        otlp_endpoint=otlp_endpoint,
        log_level=log_level,
    )
    console = Console(stderr=True, highlight=False)
    with _cell_or_exit(options, console) as (cell, folder):
        _announce(cell, folder, as_json, console)
        _watch(cell, console)


def demo(model: Model = models.DEFAULT_MODEL) -> None:
    """Start a cell, stream the answer to one chat prompt, show timings and record, stop everything."""
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    with _cell_or_exit(CellOptions(model=model, listen="127.0.0.1:0"), console) as (cell, _):
        console.print(f"[green]ready[/] after {time.monotonic() - started:.1f} s; asking: [bold]{DEMO_PROMPT}[/]\n")
        code = asyncio.run(_ask(cell.address, console))
        console.print("\nstopping every process")
    console.print(f"[green]done[/] in {time.monotonic() - started:.1f} s; nothing is left running")
    raise typer.Exit(code)


async def _ask(address: str, console: Console) -> int:
    request = pb.GenerateRequest(request_id=f"demo-{secrets.token_hex(4)}", max_output_tokens=DEMO_OUTPUT_TOKENS)
    request.chat.messages.add(role="user", content=DEMO_PROMPT)
    request.sampling.temperature = 0.0
    code = await generate(address, request, Printer(as_json=False, quiet=False), timeout_s=120)
    async with connect(address) as stub:
        answer = await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)
    console.print("\n[bold]record[/]")
    console.print(timeline(answer.record))
    return code


@contextmanager
def _cell_or_exit(options: CellOptions, console: Console) -> Iterator[tuple[Cell, Path]]:
    """A running cell with its folder of logs. A failure to start is told in a sentence and ends the program with 1."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-"))
    _stop_on_signals()
    try:
        _pull(options.model, console)
        with running_cell(options, folder, _progress(console)) as cell:
            yield cell, folder
    except (StartFailed, models.ModelError, models.UnsupportedModel) as error:
        console.print(f"[red]{error}[/]", markup=True)
        raise typer.Exit(EXIT.FAILED) from None
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(EXIT.OK) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stop_on_signals() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _progress(console: Console) -> CellProgress:
    shown: dict[str, str] = {}

    def tell(name: str, words: str, waited_s: float) -> None:
        line = f"{words} ({waited_s:.0f} s)" if waited_s >= 1 and int(waited_s) % 5 == 0 else words
        if shown.get(name) != line and (words not in shown.get(name, "") or line != words):
            shown[name] = line
            console.print(f"  {name}: {line}")

    return tell


def _announce(cell: Cell, folder: Path, as_json: bool, console: Console) -> None:
    if as_json:
        processes = [*cell.routers, *cell.prefill, *cell.decode]
        print(
            json.dumps({"address": cell.address, "processes": {c.name: {**c.ready, "pid": c.process.pid} for c in processes}}),
            flush=True,
        )
        return
    console.print(f"[green]ready[/]: gRPC at [bold]{cell.address}[/] (reflection on), logs in {folder}")
    for child in (*cell.routers, *cell.prefill, *cell.decode):
        console.print(f"  {child.name}: {child.address}, metrics on port {child.ready.get('metrics_port')}")
    console.print(f'try: tandem generate --address {cell.address} "Say hello."     Ctrl-C stops everything')


def _watch(cell: Cell, console: Console) -> None:
    """Until a signal comes or a process ends by itself."""
    while True:
        ended = cell.supervisor.ended()
        if ended is not None:
            raise StartFailed(f"{ended.name} ended with code {ended.process.returncode}; the end of its log:\n{ended.tail()}")
        time.sleep(WATCH_S)


@models_app.command("pull")
def models_pull(
    name: Annotated[str, typer.Argument(help="A known name or a hub id org/name.")] = models.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch a model into the cache folder, with its checksum; does nothing when it is there."""
    console = Console(stderr=True, highlight=False)
    try:
        ref = _pull(name, console)
    except (models.ModelError, models.UnsupportedModel) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT.FAILED) from None
    if as_json:
        print(json.dumps({"name": ref.name, "path": str(ref.path), "format": ref.format, "snapshot": ref.snapshot}))
    else:
        console.print(f"{ref.name}: {ref.path} ({ref.format}), snapshot {ref.snapshot[:12]}")


@models_app.command("list")
def models_list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Models in the cache folder."""
    found = models.list_models()
    if as_json:
        print(json.dumps([{"name": r.name, "path": str(r.path), "format": r.format, "snapshot": r.snapshot} for r in found]))
        return
    if not found:
        print(f"no models yet; fetch the default one with `tandem models pull {models.DEFAULT_MODEL}`")
        return
    table = Table(box=None)
    for column in ("name", "format", "snapshot", "path"):
        table.add_column(column)
    for ref in found:
        table.add_row(ref.name, ref.format, ref.snapshot[:12], str(ref.path))
    Console(highlight=False).print(table)


def _pull(name: str, console: Console) -> models.ModelRef:
    """Fetch with a progress bar; returns at once when the model is there."""
    columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(f"looking for {name}", total=None)

        def tell(progress: models.PullProgress) -> None:
            bars.update(task, description=progress.stage, completed=progress.done_bytes, total=progress.total_bytes)

        return models.pull(name, tell)

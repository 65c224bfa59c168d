"""`tandem up`: a whole cell on this machine until a signal comes."""

import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from models import DEFAULT_MODEL
from tandem_cli.cell import BadOption, Cell, CellOptions, check_adapters, parse_setting
from tandem_cli.client import DEFAULT_ADDRESS
from tandem_cli.completion import model_names
from tandem_cli.exits import Exit, Failure
from tandem_cli.http_option import Http, NoHttp, door_sentence, http_listen
from tandem_cli.local_cell import Teller, describe, teller, with_local_cell

#: How often the processes are looked at.
WATCH_S = 0.2


Adapters = Annotated[
    list[str] | None,
    typer.Option(help="name=folder of a LoRA adapter, as PEFT writes it, that requests may name; may be repeated."),
]


class Dtype(StrEnum):
    """Types of weights and KV."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class WeightQuantisation(StrEnum):
    """What the matrices of linear layers are kept as."""

    OFF = "off"
    INT8 = "int8"


class Transport(StrEnum):
    """Ways of KV pages between processes of one machine."""

    TCP = "tcp"
    CMA = "cma"


class LogLevel(StrEnum):
    """Least severe lines that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def up(
    model: Annotated[
        str,
        typer.Option(help="A known name, a .gguf file, a folder with safetensors, or a hub id.", autocompletion=model_names),
    ] = DEFAULT_MODEL,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Prefill members; 0: decode members compute prompts.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode members.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Routers; the first takes --listen, others a free port.")] = 1,
    listen: Annotated[str, typer.Option(help="host:port of the first router; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    http: Http = None,
    no_http: NoHttp = False,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the first router's metrics; 0 takes a free one.")
    ] = 0,
    redis_url: Annotated[str, typer.Option(help="redis://… of a server; empty starts an embedded one.")] = "",
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and KV.")] = Dtype.BFLOAT16,
    weight_quantisation: Annotated[
        WeightQuantisation, typer.Option(help="int8 keeps the matrices of linear layers so: faster, and a little less exact.")
    ] = WeightQuantisation.OFF,
    adapter: Adapters = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads of each member's engine.")] = 1,
    lend_cores: Annotated[
        bool, typer.Option(help="A member's step also uses the threads of members that have nothing to compute.")
    ] = True,
    kv_tokens: Annotated[int, typer.Option(min=64, help="KV memory of each member, in tokens.")] = 16_384,
    context_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of prompt and output; 0: the model's own limit.")] = 0,
    transport: Annotated[Transport, typer.Option(help="How NIXL moves pages: tcp, or cma (shared memory).")] = Transport.TCP,
    otlp_endpoint: Annotated[str, typer.Option(help="http://host:4317 of a trace collector; empty: none.")] = "",
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines in the logs.")] = LogLevel.INFO,
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs, kept; unset: one that goes away at the end.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting of a role, such as prefill.max_step_tokens=128; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output: ready, stopping, stopped.")] = False,
) -> None:
    """Start a whole cell on this machine: store, routers, prefill and decode members. Ctrl-C or SIGTERM stops it."""
    try:
        extra = tuple(parse_setting(text) for text in settings or ())
        adapters = check_adapters(adapter or ())
        door = http_listen(http, no_http)
    except BadOption as error:
        raise Failure(Exit.BAD_INPUT, str(error)) from None
    options = CellOptions(
        model, dtype, weight_quantisation, adapters, prefill, decode, routers, listen, metrics_port, redis_url, threads,
        lend_cores, kv_tokens, context_tokens, transport, otlp_endpoint, log_level, door, extra,
    )  # fmt: skip
    tell = teller(as_json)
    with_local_cell(options, tell, partial(_watch, tell, door), logs)


def _watch(tell: Teller, door: str, cell: Cell, folder: Path) -> NoReturn:
    """Until a signal comes or a process ends by itself."""
    _announce(cell, folder, tell, door)
    while True:
        cell.supervisor.check()
        time.sleep(WATCH_S)


def _announce(cell: Cell, folder: Path, tell: Teller, door: str) -> None:
    http = {"http_address": cell.http_address} if door else {}
    processes = [describe(child) for child in cell.processes]
    tell.event("ready", address=cell.address, **http, logs=str(folder), processes=processes)
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("process", "pid", "address", "metrics"):
        table.add_column(column, overflow="fold")
    for child in cell.processes:
        port = child.ready.get("metrics_port")
        metrics = f"http://{child.address.rpartition(':')[0]}:{port}/metrics" if port else ""
        table.add_row(child.name, str(child.process.pid), child.address, metrics)
    where = "" if cell.address == DEFAULT_ADDRESS else f"--address {cell.address} "
    tell.say(f"ready: gRPC at {cell.address}, reflection on", "green")
    if door:
        tell.say(door_sentence(cell.http_url, door), "green")
    tell.console.print(table)
    tell.say(f"logs: {folder}")
    tell.say(f'try:  tandem generate {where}"Say hello."      Ctrl-C stops everything')

"""`tandem doctor`: what a cell needs, on this machine or of a running cell, and what to change."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from models import DEFAULT_MODEL
from tandem_cli.client import DEFAULT_ADDRESS
from tandem_cli.completion import model_names
from tandem_cli.consoles import error_console, output_console
from tandem_cli.doctor import running
from tandem_cli.doctor.finding import Finding, Result, any_fails
from tandem_cli.doctor.here import CHECKS, Wanted
from tandem_cli.exits import Exit, Failure
from tandem_cli.models_commands import AsJson
from tandem_cli.up import Dtype

_STYLES = {Result.OK: "green", Result.WARNING: "yellow", Result.FAILS: "bold red", Result.SKIPPED: "dim"}
Step = tuple[str, Callable[[], Iterable[Finding]]]
Addresses = list[str] | None


def doctor(
    router: Annotated[
        Addresses,
        typer.Option(help="host:port of a running cell's router, may be repeated: the cell is checked, not this machine."),
    ] = None,
    member: Annotated[Addresses, typer.Option(help="With --router: host:port of a member, for each.")] = None,
    metrics: Annotated[str, typer.Option(help="With --router: host:port of each process's metrics, comma-separated.")] = "",
    request: Annotated[bool, typer.Option(help="With --router: ask for one token.")] = True,
    served_model: Annotated[str, typer.Option(help="With --router: the model that is asked; empty means the only one.")] = "",
    redis_url: Annotated[str, typer.Option(help="redis://… of a request store.", envvar="TANDEM_REDIS_URL")] = "",
    cell: Annotated[str, typer.Option(help="Name of the cell in that store.", envvar="TANDEM_CELL")] = "default",
    model: Annotated[str, typer.Option(help="As for `tandem up`.", autocompletion=model_names)] = DEFAULT_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and KV.")] = Dtype.BFLOAT16,
    members: Annotated[int, typer.Option(min=1, max=128, help="Members that are to run on this machine.")] = 2,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads of each.")] = 1,
    kv_tokens: Annotated[int, typer.Option(min=64, help="KV memory of each, in tokens.")] = 16_384,
    listen: Annotated[str, typer.Option(help="Where a router is to listen.")] = DEFAULT_ADDRESS,
    net_devices: Annotated[str, typer.Option(help="Network devices to try, beside lo, comma-separated.")] = "",
    transfer: Annotated[bool, typer.Option(help="Write with NIXL between two processes, and measure it.")] = True,
    as_json: AsJson = False,
) -> None:
    """Check this machine for a cell or, with --router, a running cell, and say what to change. Exit status 1: something fails."""
    if router:
        named = tuple(part.strip() for part in metrics.split(",") if part.strip())
        places = running.completed(running.Places(tuple(router), tuple(member or ()), named, redis_url, cell))
        steps = _cell_steps(places, served_model, request)
    else:
        wanted = Wanted(
            model, dtype.value, members, threads, kv_tokens, listen, net_devices, redis_url, cell, transfer
        )  # fmt: skip
        steps = [(words, partial(check, wanted)) for words, check in CHECKS]
    try:
        findings = _run(steps, as_json)
    except KeyboardInterrupt:
        raise Failure(Exit.CANCELLED, "interrupted") from None
    _show(findings, as_json)
    if any_fails(findings):
        raise typer.Exit(Exit.FAILED)


def _cell_steps(places: running.Places, model: str, request: bool) -> list[Step]:
    steps: list[Step] = [
        ("routers and members", partial(running.check_processes, places)),
        ("versions and clocks", partial(running.check_metrics, places)),
        ("the request store", partial(running.check_store, places)),
    ]
    return [*steps, ("one request", partial(running.check_request, places, model))] if request else steps


def _run(steps: Sequence[Step], quiet: bool) -> list[Finding]:
    console, findings = error_console(quiet), []
    with console.status("") as status:
        for words, check in steps:
            status.update(f"looking at {words}")
            findings += list(check())
    return findings


def _show(findings: Sequence[Finding], as_json: bool) -> None:
    counts = {result.value: sum(one.result is result for one in findings) for result in Result}
    if as_json:
        print(json.dumps({"findings": [one.as_dict() for one in findings], "counts": counts}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("check", "result", "finding", "what to change"):
        table.add_column(column, overflow="fold")
    for one in findings:
        table.add_row(one.check, one.result.value, one.finding, one.change, style=_STYLES[one.result])
    console = output_console()
    console.print(table)
    console.print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items() if count))

"""`tandem bench`: load for a running cell, and where its time goes."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import grpc.aio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.v1 import inference_pb2 as pb
from tandem_cli.calls import call
from tandem_cli.cell_file import find_cell
from tandem_cli.client import DEFAULT_ADDRESS, failure_of
from tandem_cli.consoles import error_console, output_console
from tandem_cli.exits import Exit, Failure
from tandem_cli.load.door import grpc_door
from tandem_cli.load.drive import Run, drive
from tandem_cli.load.figures import figures, level_table
from tandem_cli.load.measured import Measured
from tandem_cli.load.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_INPUT,
    DEFAULT_OUTPUT,
    LoadOptions,
    at_level,
    longest,
    workload_of,
)
from tandem_cli.load.profile import NoMetrics, profile_tables, read_sums
from tandem_cli.load.tables import Tabled
from tandem_cli.load.workload import BadWorkload, Level, Loop, Workload, schedule
from tandem_cli.models_commands import AsJson

WARM_UP_SEED = -1
REASONS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: on which router and model, and from which processes' metrics (host:port; empty: none are read)."""

    address: str
    model: str
    vocabulary_size: int
    workload: Workload
    requests: int | None
    seed: int
    metrics: tuple[str, ...]

    def run(self, level: Level) -> Run:
        """One level of it."""
        return Run(at_level(self.workload, level, self.requests), level, self.seed, self.vocabulary_size)


def bench(
    address: Annotated[
        str, typer.Option("--address", "--router", help="host:port of a router.", envvar="TANDEM_ADDRESS")
    ] = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Name of a served model; empty means the only one.")] = "",
    concurrency: Annotated[
        str, typer.Option(help=f"Clients at once, comma-separated; {DEFAULT_CONCURRENCY} if nothing else is said.")
    ] = "",
    rate: Annotated[str, typer.Option(help="Or requests a second, comma-separated: they wait for no answer.")] = "",
    input_tokens: Annotated[
        str, typer.Option("--input", help=f"Tokens of a prompt, random ones: a number, or 16-1024 ({DEFAULT_INPUT}).")
    ] = "",
    output_tokens: Annotated[str, typer.Option("--output", help=f"Tokens of an answer, the same ({DEFAULT_OUTPUT}).")] = "",
    workload: Annotated[
        str, typer.Option(help="Instead: fixed-512-128, random, trace, …, or a .toml file; see bench/README.md.")
    ] = "",
    requests: Annotated[
        int | None, typer.Option(min=1, max=20_000, help="Requests of each level; unset: three for each client, at least six.")
    ] = None,
    cancel_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of requests cancelled somewhere on their way.")
    ] = 0.0,
    warm_up: Annotated[int, typer.Option(min=0, max=10_000, help="Requests before, which are not counted.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Another one makes other prompts: equal ones may be in caches.")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="Where the time went, from the metrics of the processes.")] = False,
    metrics: Annotated[
        str, typer.Option(help="With --profile: host:port of each process's metrics; a cell of `tandem up` here is found.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Load a running cell and measure it: time to first token, inter-token time, tokens a second, errors by reason."""
    try:
        chosen = workload_of(LoadOptions(workload, concurrency, rate, input_tokens, output_tokens, requests, cancel_share))
    except BadWorkload as error:
        raise Failure(Exit.BAD_INPUT, str(error)) from None
    served = _served(address, model)
    _check_fits(chosen, served)
    where = _metrics_of(address, metrics) if profile or metrics else ()
    plan = Plan(address, served.name, served.vocabulary_size, chosen, requests, seed, where)
    tell = error_console(quiet=as_json)
    tell.print(f"{served.name} at {address}: {chosen.about}", markup=False)
    try:
        _warm_up(plan, warm_up, tell)
        done = [_measure(plan, level, tell, as_json) for level in chosen.levels]
    except KeyboardInterrupt:
        raise Failure(Exit.CANCELLED, "interrupted; what was under way is cancelled") from None
    except NoMetrics as error:
        raise Failure(Exit.UNREACHABLE, str(error)) from None
    if not as_json:
        _show(done)
    if not any(one["ended"] or one["cancelled"] for _, one, _ in done):
        raise Failure(Exit.FAILED, "not one request ended well")


Done = tuple[Level, dict[str, Any], list[Tabled]]


def _served(address: str, model: str) -> pb.Model:
    found: dict[str, pb.Model] = {one.name: one for one in call(address, "ListModels", pb.ListModelsRequest()).models}
    if not found:
        raise Failure(Exit.REFUSED, f"the router at {address} serves no model now: it sees no member")
    if not model and len(found) == 1:
        return next(iter(found.values()))
    if model not in found:
        raise Failure(Exit.NOT_FOUND, f"--model {model or 'is needed'}: {address} serves {', '.join(sorted(found))}")
    return found[model]


def _check_fits(workload: Workload, served: pb.Model) -> None:
    if longest(workload) > served.context_tokens:
        raise Failure(
            Exit.BAD_INPUT,
            f"requests of up to {longest(workload)} tokens, prompt and answer together, do not fit: {served.name} takes "
            f"{served.context_tokens} at most (shorten --input or --output)",
        )


def _metrics_of(address: str, named: str) -> tuple[str, ...]:
    if named:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    cell = find_cell(address)
    if cell is None:
        raise Failure(
            Exit.BAD_INPUT,
            f"--profile reads the metrics of the processes, and the cell behind {address} was not started here by `tandem up`: "
            "name them all with --metrics host:port,host:port",
        )
    return tuple(cell.metrics())


def _warm_up(plan: Plan, requests: int, tell: Console) -> None:
    """One after the other, uncounted. Raises Failure when the first of them fails: nothing else would do better."""
    if not requests:
        return
    short = replace(plan.workload, requests_min=requests, requests_per_client=0, beside=None, cancel_share=0.0)
    made = asyncio.run(_driven(plan, Run(short, Level(Loop.CLOSED, 1.0), WARM_UP_SEED, plan.vocabulary_size)))
    if failures := made.failures():
        tell.print(f"warm-up: {failures[0]}", markup=False)


async def _driven(plan: Plan, run: Run, ended: Any = None) -> Measured:
    try:
        async with grpc_door(plan.address, plan.model) as door:
            return await (drive(door, run) if ended is None else drive(door, run, ended))
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, plan.address) from None


def _measure(plan: Plan, level: Level, tell: Console, as_json: bool) -> Done:
    run = plan.run(level)
    total = len(schedule(run.workload, level, run.seed, run.vocabulary_size))
    before = read_sums(plan.metrics)
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=tell, transient=True, disable=not tell.is_terminal) as bars:
        task = bars.add_task(str(level), total=total)
        measured = asyncio.run(_driven(plan, run, lambda seen: bars.advance(task)))
    tables = profile_tables(read_sums(plan.metrics).minus(before), measured.seconds) if plan.metrics else []
    made = figures(level, measured)
    tell.print(f"  {level}: {made['requests']} requests in {measured.seconds:.1f} s", markup=False)
    if as_json:
        told = {"profile": [{"words": one.words, "rows": one.as_dicts()} for one in tables]} if tables else {}
        print(json.dumps({**made, **told}), flush=True)
    for reason, failure in _examples(measured):
        tell.print(f"    {made['failures'][reason]} failed with {reason}; one of them: {failure}", markup=False)
    return level, made, tables


def _examples(measured: Measured) -> list[tuple[str, str]]:
    """A sentence for each reason."""
    found = {one.reason: one.failure for one in measured.requests if one.failure}
    return [(reason, found[reason]) for reason in list(measured.failures_by_reason())[:REASONS_SHOWN]]


def _show(done: Sequence[Done]) -> None:
    console = output_console()
    console.print(level_table([(level, made) for level, made, _ in done]).rich())
    for level, _, tables in done:
        for one in tables:
            console.print(f"\n{level}" + (f": {one.words}" if one.words else ""))
            console.print(one.rich())

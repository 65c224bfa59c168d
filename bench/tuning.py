"""`python -m bench.tuning`: what each knob does to latency and throughput on this machine, in turns with the default."""

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.__main__ import WARM_UP_REQUESTS, WARM_UP_SEED, measured_on
from bench.knobs import COLUMNS, DEFAULT, KV_TOKENS, Knob, Variant, chosen, row
from bench.measured import Measured
from bench.report import machine, table, write_between
from tandem_cli.cell import Cell, CellOptions, running_cell
from tandem_cli.load.drive import Run
from tandem_cli.load.workload import BadWorkload, Level, Loop, Workload, find_workload, load_workload
from tandem_cli.supervisor import CellFailed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"


class Bench:
    """Starts cells and drives them. Its own default cell stays up all the time, and is idle while another is driven."""

    def __init__(self, options: CellOptions, workload: Workload, at_once: int, rounds: int) -> None:
        self._options = options
        self._workload = workload
        self._level = Level(Loop.CLOSED, float(at_once))
        self._rounds = rounds
        self._vocabulary_size = models.load_config(models.resolve(options.model)).vocabulary_size
        self._tell = Console(stderr=True, highlight=False)
        #: Of the next round's prompts: fresh in each, or the default's cell, which is always the same, would still have them.
        self._seed = 0

    def start(self, stack: ExitStack, variant: Variant) -> Cell:
        """A warm cell."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-tuning-")))
        cell = stack.enter_context(running_cell(variant.options(self._options), folder))
        short = replace(self._workload, requests_min=WARM_UP_REQUESTS, requests_per_client=1)
        measured_on(cell, Run(short, Level(Loop.CLOSED, 1.0), WARM_UP_SEED, self._vocabulary_size))
        return cell

    def rows(self, knob: Knob, default: Cell, until: float) -> list[list[str]]:
        """The default's row and one for each variant, measured round by round in turns that begin with another one each time.

        until: of time.monotonic; no round but the first begins later.
        """
        with ExitStack() as stack:
            cells = {DEFAULT: default, **{variant: self.start(stack, variant) for variant in knob.variants}}
            runs: dict[Variant, list[Measured]] = {variant: [] for variant in cells}
            order = list(cells)
            for done in range(self._rounds):
                if done and time.monotonic() >= until:
                    break
                first = done % len(order)
                for variant in (*order[first:], *order[:first]):
                    runs[variant].append(self._one(cells[variant], variant))
                self._seed += 1
        return [row(variant, made, runs[DEFAULT]) for variant, made in runs.items()]

    def _one(self, cell: Cell, variant: Variant) -> Measured:
        made = measured_on(cell, Run(self._workload, self._level, self._seed, self._vocabulary_size))
        doubt = f", disturbed: {made.disturbance}" if made.disturbance.disturbed else ""
        self._tell.print(f"{variant}: {made.output_tokens_per_s:.1f} tokens/s{doubt}")
        return made


def tuning(
    knobs: Annotated[str, typer.Option(help="Which to turn, comma-separated; unset: all. A wrong name lists them.")] = "",
    workload: Annotated[str, typer.Option(help="A name in bench/workloads, or the path of a .toml file.")] = "tuning",
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Clients at once, in a closed loop.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in turns with the default.")] = 3,
    minutes: Annotated[float, typer.Option(min=0.1, help="Each knob has its share of them: rounds over it are left out.")] = 10.0,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    write: Annotated[bool, typer.Option("--write", help="Put the table into docs/tuning.md.")] = False,
) -> None:
    """One prefill and one decode member: page size, steps, limits, budgets, lent cores and drafts, each against the default."""
    try:
        turned, asked = chosen(knobs), load_workload(find_workload(workload))
    except (ValueError, BadWorkload) as error:
        print(f"bench.tuning: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    options = CellOptions(model=model, dtype=dtype, listen="127.0.0.1:0", log_level="warning", kv_tokens=KV_TOKENS)
    bench = Bench(options, asked, at_once, rounds)
    try:
        with ExitStack() as stack:
            default = bench.start(stack, DEFAULT)
            tables, began = [], time.monotonic()
            for number, knob in enumerate(turned, start=1):
                rows = bench.rows(knob, default, began + 60.0 * minutes * number / len(turned))
                tables.append(f"**{knob.name}**\n\n{table(COLUMNS, rows)}")
    except CellFailed as error:
        print(f"bench.tuning: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    how = f"{asked.about}, {at_once} at once, one prefill and one decode member, {dtype}, up to {rounds} rounds in turns."
    command = f"Command: `{' '.join(('python -m bench.tuning', *sys.argv[1:]))}`"
    text = "\n\n".join([how, f"Machine: {machine()}.", command, *tables])
    print(text)
    if write:
        write_between(PAGE, "tuning", text)


if __name__ == "__main__":
    typer.run(tuning)

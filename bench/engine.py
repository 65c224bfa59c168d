"""Steps of the model by themselves, beside one read of what they must read: `python -m bench.engine`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.engine_steps import Shape, kv_read, step_of, weights_read
from bench.report import machine, table, write_between
from bench.targets import Bound
from bench.turns import Bursts, doubts, in_turns, ratio
from engine.native.library import chosen_set, open_library
from engine.runner import ModelRunner

README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).parent / "results" / "README.md"
NATIVE = "native"
READS = WEIGHTS, WEIGHTS_AND_KV = ("read of the weights", "read of weights and live KV")
PAGE_TOKENS = 16
COLUMNS = ("step", "what", "min ms", "median ms", "against weights", "against weights + KV", "disturbed bursts")
TARGET_COLUMNS = ("figure", "step ms", "read ms", "ratio", "must", "aim", "", "disturbed bursts")


@dataclass(frozen=True, slots=True)
class Target:
    """A step of the native backend over a read, both of one run, medians."""

    shape: Shape
    against: str
    bound: Bound


TARGETS = (
    Target(Shape(1, 128), WEIGHTS, Bound(1.4, 1.2)),
    Target(Shape(1, 512), WEIGHTS, Bound(1.4, 1.2)),
    Target(Shape(32, 512), WEIGHTS_AND_KV, Bound(2.2, 1.6)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape: bursts of the reads and of each backend's step, by name."""

    shape: Shape
    bursts: Mapping[str, Bursts]

    def rows(self) -> list[list[str]]:
        """Lines of the table: the reads, then the steps with their ratios to them."""
        lines = []
        for name, one in self.bursts.items():
            ratios = [ratio(one, read) if (read := self.bursts.get(of)) and name not in READS else None for of in READS]
            figures = [
                f"{one.least * 1e3:.1f}",
                f"{one.median * 1e3:.1f}",
                *("-" if each is None else f"{each:.2f}" for each in ratios),
            ]
            lines.append([str(self.shape), name, *figures, doubts(one)])
        return lines


def target_rows(measured: list[Measured]) -> list[list[str]]:
    """What the targets ask, where it was measured."""
    rows = []
    for target in TARGETS:
        bursts = next((one.bursts for one in measured if one.shape == target.shape), {})
        step, read = bursts.get(NATIVE), bursts.get(target.against)
        found = ratio(step, read) if step and read else None
        rows.append(
            [
                f"{target.shape}: step against one {target.against}",
                f"{step.median * 1e3:.1f}" if step else "-",
                f"{read.median * 1e3:.1f}" if read else "-",
                f"{found:.2f}" if found else "-",
                f"≤ {target.bound.must:g}",
                f"≤ {target.bound.aim:g}",
                target.bound.verdict(found, more_is_better=False),
                doubts(step, read) if step and read else "-",
            ]
        )
    return rows


def load(backend: str, shapes: list[Shape], threads: int, model: str) -> ModelRunner:
    """A runner with as many pages as the largest shape needs."""
    pages = 1 + max(shape.sequences * shape.pages(PAGE_TOKENS) for shape in shapes)
    settings = {"page_tokens": PAGE_TOKENS, "total_pages": pages, "threads": threads, "backend": backend}
    return ModelRunner.load(models.resolve(model), dtype="bfloat16", **settings)


def measure(runners: Mapping[str, ModelRunner], shape: Shape, rounds: int, threads: int) -> Measured:
    """One shape on all backends. The memory that is read is the native runner's own."""
    native, reader = runners[NATIVE], open_library(chosen_set()).engine(threads)
    weights, kv = weights_read(native.decoder.weights), kv_read(native, shape)
    calls: dict[str, Callable[[], object]] = {WEIGHTS: lambda: reader.read(weights)}
    if shape.decode:
        calls[WEIGHTS_AND_KV] = lambda: reader.read([*weights, *kv])
    calls |= {name: step_of(runner, shape) for name, runner in runners.items()}
    return Measured(shape, in_turns(calls, rounds))


def shapes_of(decode: str, prefill: str) -> list[Shape]:
    """`1x128,8x512` and `128,512` as shapes. Raises ValueError."""
    pairs = [pair.split("x") for pair in decode.split(",") if pair]
    shapes = [Shape(int(sequences), int(tokens)) for sequences, tokens in pairs]
    return shapes + [Shape(1, int(tokens), decode=False) for tokens in prefill.split(",") if tokens]


def bench_engine(
    decode: Annotated[str, typer.Option(help="Decode steps: sequences x context in tokens.")] = "1x128,1x512,8x512,16x512,32x512",
    prefill: Annotated[str, typer.Option(help="Prompts computed at once, in tokens.")] = "128,512",
    backends: Annotated[
        str, typer.Option(help="Backends, comma-separated; native comes with them, for what is read.")
    ] = "native,torch",
    threads: Annotated[int, typer.Option(min=1, help="Of the engine, and of the reads.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each; figures are medians over them.")] = 9,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    write: Annotated[
        bool, typer.Option("--write", help="Put the tables into bench/README.md and bench/results/README.md.")
    ] = False,
) -> None:
    """Decode steps and prompts of each backend, in turns with one read of the weights, and of weights and live KV."""
    try:
        shapes = shapes_of(decode, prefill)
    except ValueError:
        print("bench.engine: give --decode as 1x128,8x512 and --prefill as 128,512", file=sys.stderr)
        raise typer.Exit(2) from None
    names = list(dict.fromkeys((NATIVE, *backends.split(","))))
    runners = {name: load(name, shapes, threads, model) for name in names}
    tell = Console(stderr=True, highlight=False)
    measured = []
    for shape in shapes:
        measured.append(measure(runners, shape, rounds, threads))
        tell.print("; ".join(f"{name} {bursts.median * 1e3:.1f} ms" for name, bursts in measured[-1].bursts.items()))
    rows = [line for one in measured for line in one.rows()]
    command = f"Command: `{' '.join(('python -m bench.engine', *sys.argv[1:]))}`"
    how = f"bfloat16, {threads} thread(s), {rounds} bursts of each in turns; {chosen_set().name} instructions."
    text = "\n\n".join([how, f"Machine: {machine()}.", command, table(COLUMNS, rows)])
    targets = table(TARGET_COLUMNS, target_rows(measured))
    print(f"{text}\n\n{targets}")
    if write:
        write_between(README, "engine", text)
        write_between(RESULTS, "steps", f"{targets}\n\n{how} {command}")


if __name__ == "__main__":
    typer.run(bench_engine)

"""What int8 weights bring and what they cost: steps in turns, and a text read with both: `python -m bench.quantised`."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.engine import shapes_of
from bench.engine_steps import Shape, step_of
from bench.report import machine, table, write_between
from bench.turns import Bursts, doubts, in_turns, ratio
from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.log_probs import TokenLogProb, following
from engine.quantisation import WeightQuantisation
from engine.runner import ModelRunner

README = Path(__file__).with_name("README.md")
TEXT = Path(__file__).with_name("quantised_text.txt")
PAGE_TOKENS = 16
CHUNK_TOKENS = 64
BFLOAT16, INT8, FLOAT32 = "bfloat16", "int8", "float32"
STEP_COLUMNS = ("step", "bfloat16 ms", "int8 ms", "bfloat16 / int8", "worst and best round", "disturbed bursts")
LOSS_COLUMNS = ("weights", "mean log-probability", "perplexity", "lost against bfloat16", "likeliest token as with bfloat16")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model says of each token of a text but the first: how likely it was, and which one was likeliest."""

    tokens: tuple[TokenLogProb, ...]

    @property
    def mean(self) -> float:
        """Natural logarithm a token."""
        return statistics.fmean(token.value for token in self.tokens)

    def row(self, name: str, other: "Reading") -> list[str]:
        """Its line of the table, beside `other`."""
        losses = [theirs.value - ours.value for ours, theirs in zip(self.tokens, other.tokens, strict=True)]
        error = statistics.stdev(losses) / math.sqrt(len(losses))
        same = sum(ours.top_ids == theirs.top_ids for ours, theirs in zip(self.tokens, other.tokens, strict=True))
        compared = [f"{statistics.fmean(losses):+.4f} ± {error:.4f}", f"{same / len(losses):.1%}"]
        return [name, f"{self.mean:.4f}", f"{math.exp(-self.mean):.3f}", *(compared if other is not self else ("-", "-"))]


def read(runner: ModelRunner, ids: Sequence[int]) -> Reading:
    """The text in chunks, with the logits of every token."""
    pages = range(1, 1 + pages_for(len(ids), runner.layout.groups[0].page_tokens))
    tokens: list[TokenLogProb] = []
    for first in range(0, len(ids) - 1, CHUNK_TOKENS):
        chunk = ids[first : first + CHUNK_TOKENS]
        rows = Rows("text", chunk, first, (pages,), wants_logits=True, all_logits=True)
        tokens += following(runner.run(Batch((rows,))).numpy(), ids[first + 1 : first + 1 + len(chunk)], 1)
    return Reading(tuple(tokens))


def step_row(shape: Shape, bursts: Mapping[str, Bursts]) -> list[str]:
    """The line of one step: medians over the bursts, the ratio of bursts that are neighbours in time, and how far that went."""
    plain, small = bursts[BFLOAT16], bursts[INT8]
    ratios = [above / below for above, below in zip(plain.median_s, small.median_s, strict=True)]
    return [
        str(shape),
        *(f"{each.median * 1e3:.1f}" for each in (plain, small)),
        f"**{ratio(plain, small):.2f}**",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        doubts(plain, small),
    ]


def load(model: str, pages: int, threads: int, dtype: str, kind: WeightQuantisation) -> ModelRunner:
    """The best backend for the dtype."""
    settings = {"page_tokens": PAGE_TOKENS, "total_pages": pages, "threads": threads}
    return ModelRunner.load(models.resolve(model), dtype=dtype, weight_quantisation=kind, **settings)


def bench_quantised(
    decode: Annotated[str, typer.Option(help="Decode steps: sequences x context in tokens.")] = "1x128,8x128,32x128",
    prefill: Annotated[str, typer.Option(help="Prompts computed at once, in tokens.")] = "128,512",
    threads: Annotated[int, typer.Option(min=1, help="Of the engine.")] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="Bursts of each, in turns.")] = 15,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    write: Annotated[bool, typer.Option("--write", help="Put the tables into bench/README.md.")] = False,
) -> None:
    """Steps with bfloat16 and with int8 weights, in turns, and how likely a text is with both, and with float32."""
    try:
        shapes = shapes_of(decode, prefill)
    except ValueError:
        print("bench.quantised: give --decode as 1x128,8x512 and --prefill as 128,512", file=sys.stderr)
        raise typer.Exit(2) from None
    ids = models.load_tokenizer(models.resolve(model)).encode(TEXT.read_text(encoding="utf-8"))
    pages = 1 + max(pages_for(len(ids), PAGE_TOKENS), *(shape.sequences * shape.pages(PAGE_TOKENS) for shape in shapes))
    kinds = {BFLOAT16: WeightQuantisation.OFF, INT8: WeightQuantisation.INT8}
    runners = {name: load(model, pages, threads, BFLOAT16, kind) for name, kind in kinds.items()}
    readings = {name: read(runner, ids) for name, runner in runners.items()}
    readings[FLOAT32] = read(load(model, pages, threads, FLOAT32, WeightQuantisation.OFF), ids)
    tell, rows = Console(stderr=True, highlight=False), []
    for shape in shapes:
        rows.append(step_row(shape, in_turns({name: step_of(runner, shape) for name, runner in runners.items()}, rounds)))
        tell.print(" | ".join(rows[-1]))
    steps = f"Steps: {runners[INT8].backend}, {threads} thread(s), medians of {rounds} bursts of each in turns."
    losses = table(LOSS_COLUMNS, [one.row(name, readings[BFLOAT16]) for name, one in readings.items()])
    text = f"Text: the {len(ids)} tokens of `{TEXT.name}`; float32 is torch's, for how far rounding alone goes."
    command = f"Command: `{' '.join(('python -m bench.quantised', *sys.argv[1:]))}`"
    told = "\n\n".join([f"Machine: {machine()}.", command, steps, table(STEP_COLUMNS, rows), text, losses])
    print(told)
    if write:
        write_between(README, "quantised", told)


if __name__ == "__main__":
    typer.run(bench_quantised)

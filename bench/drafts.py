"""What drafts bring: the same outputs with and without them, in turns: `python -m bench.drafts`."""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.decoding import Decoded, Decoding
from bench.disturbance import between, read_cpu_times
from bench.report import machine, table, write_between
from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.layout import pages_for
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from models import Tokenizer
from text import Message

README = Path(__file__).with_name("README.md")
PAGE_TOKENS = 16
COLUMNS = (
    *("prompt", "tokens are", "sequences", "tokens/s without", "tokens/s with", "speed-up", "worst and best round"),
    *("tokens a step", "drafts accepted", "disturbed runs"),
)
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "drawn": SamplingParams(temperature=0.8, top_p=0.95, seed=7)}
#: Texts to copy and to go on from are made of these: every sequence gets another one.
PLACES = ("harbour", "library", "orchard", "station", "bakery", "museum", "workshop", "garden")
COPY = """Repeat the following list word for word, twice.

1. The {0} opens at seven in the morning and closes at nine in the evening, except on Sundays.
2. Visitors of the {0} leave their bags at the desk and keep the numbered tag until they leave.
3. Groups of more than twelve people write to the {0} two weeks before they come.
4. Photographs may be taken in every room of the {0}, but without a flash and without a stand.
"""
ORDINARY = "Tell me how a day at the {0} begins, what goes wrong there around noon, and what is thought of it in the evening."


@dataclass(slots=True)
class Case:
    """One prompt, one way to choose, so many sequences: the runs without and with drafts, in turns."""

    prompt: str
    sampling: str
    sequences: int
    plain: list[Decoded] = field(default_factory=list)
    drafted: list[Decoded] = field(default_factory=list)
    disturbed: int = 0

    def row(self) -> list[str]:
        """Its line of the table. Speeds are medians over the rounds, the speed-up is the median of the rounds' ratios."""
        ratios = [before.seconds / after.seconds for before, after in zip(self.plain, self.drafted, strict=True)]
        last = self.drafted[-1]
        share = (
            f"{last.accepted_tokens / last.drafted_tokens:.0%} of {last.drafted_tokens}"
            if last.drafted_tokens
            else "none drafted"
        )
        return [
            self.prompt,
            self.sampling,
            str(self.sequences),
            *(f"{statistics.median(_tokens(run) / run.seconds for run in runs):.1f}" for runs in (self.plain, self.drafted)),
            f"**{statistics.median(ratios):.2f}**",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{_tokens(last) / last.steps / self.sequences:.2f}",
            share,
            f"{self.disturbed} of {len(self.plain) + len(self.drafted)}",
        ]


def _tokens(run: Decoded) -> int:
    """Tokens of the timed part: all but the first of each output, which the prompt's step chose."""
    return sum(len(output) - 1 for output in run.outputs)


def prompts_of(kind: str, sequences: int, tokenizer: Tokenizer) -> list[list[int]]:
    """As the chat template writes them, where there is one."""
    template = {"copying": COPY, "ordinary": ORDINARY}[kind]
    texts = [template.format(PLACES[number % len(PLACES)]) + " " * (number // len(PLACES)) for number in range(sequences)]
    if tokenizer.chat is None:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.encode_plain(tokenizer.chat.render([Message("user", text)])) for text in texts]


def measure(case: Case, sides: Sequence[Decoding], prompts: Sequence[Sequence[int]], output_tokens: int, rounds: int) -> None:
    """Rounds of both sides; both say the same, or the figures mean nothing."""
    plain, drafting = sides
    for side in sides:
        side.run(prompts, SAMPLINGS[case.sampling], output_tokens)
    for _ in range(rounds):
        for side, runs in ((plain, case.plain), (drafting, case.drafted)):
            before = read_cpu_times()
            runs.append(side.run(prompts, SAMPLINGS[case.sampling], output_tokens))
            case.disturbed += between(before, read_cpu_times(), (os.getpid(),)).disturbed
        if case.plain[-1].outputs != case.drafted[-1].outputs:
            raise AssertionError(f"{case.prompt}, {case.sampling}, {case.sequences} sequences: drafts changed what was said")


def bench_drafts(
    sequences: Annotated[str, typer.Option(help="Sequences beside one another.")] = "1,8",
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each sequence.")] = 160,
    draft_tokens: Annotated[int, typer.Option(min=1, max=64, help="As the setting of a decode member.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Of the engine.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turns, after one that is not counted.")] = 5,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    write: Annotated[bool, typer.Option("--write", help="Put the table into bench/README.md.")] = False,
) -> None:
    """A prompt that asks for copies and an ordinary one, with prompt lookup and without, on one decode engine."""
    counts = [int(count) for count in sequences.split(",")]
    ref = models.resolve(model)
    tokenizer = models.load_tokenizer(ref)
    pages = 1 + max(counts) * pages_for(512 + output_tokens, PAGE_TOKENS)
    runner = ModelRunner.load(ref, dtype=dtype, page_tokens=PAGE_TOKENS, total_pages=pages, threads=threads)
    tell = Console(stderr=True, highlight=False)
    rows = []
    for kind in ("copying", "ordinary"):
        for sampling in SAMPLINGS:
            for count in counts:
                case, sides = Case(kind, sampling, count), []
                for speculation in (SpeculationKind.OFF, SpeculationKind.PROMPT_LOOKUP):
                    drafts = SpeculationLimits(speculation, draft_tokens)
                    limits = SchedulerLimits(step=StepLimits(tokens=512, sequences=64), speculation=drafts)
                    sides.append(Decoding(runner, limits, tokenizer.detokeniser))
                measure(case, sides, prompts_of(kind, count, tokenizer), output_tokens, rounds)
                rows.append(case.row())
                tell.print(" | ".join(rows[-1]))
    how = f"{runner.backend}, {dtype}, {threads} thread(s), {output_tokens} tokens each, {rounds} rounds of each in turns."
    command = f"Command: `{' '.join(('python -m bench.drafts', *sys.argv[1:]))}`"
    text = "\n\n".join([how, f"Machine: {machine()}.", command, table(COLUMNS, rows)])
    print(text)
    if write:
        write_between(README, "drafts", text)


if __name__ == "__main__":
    typer.run(bench_drafts)

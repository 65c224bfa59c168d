"""What drafts bring: the same outputs with and without them, in turns: `python -m bench.drafts`."""

import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.decoding import Decoded, Decoding
from bench.disturbance import between, read_cpu_times
from bench.report import machine, table, write_between
from decode_svc.draft_loading import DraftModel, drafts_for
from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.grammar_library import CompiledGrammar, Vocabulary, compile_rule, load, save
from engine.layout import pages_for
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from models import Tokenizer
from text import Message
from text.grammar_rule import GrammarKind, GrammarRule

README = Path(__file__).with_name("README.md")
PAGE_TOKENS = 16
COLUMNS = (
    *(
        "prompt",
        "tokens are",
        "sequences",
        "drafts from",
        "tokens/s without",
        "tokens/s with",
        "speed-up",
        "worst and best round",
    ),
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
RECORD = "Describe the {0} as a JSON object with its name, its opening hours, the number of its rooms and three things to see."
#: What outputs to the last one are held to.
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_place": {"type": "string", "maxLength": 60},
        "opening_hours": {"type": "string", "maxLength": 60},
        "number_of_rooms": {"type": "integer"},
        "kind_of_building": {"enum": ["public building", "private building"]},
        "things_to_see": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name_of_the_place", "opening_hours", "number_of_rooms", "kind_of_building", "things_to_see"],
    "additionalProperties": False,
}
PROMPTS = {"copying": COPY, "ordinary": ORDINARY, "record": RECORD}
#: As the setting of a decode member has it.
DRAFT_STEP_TOKENS = 128
_SOURCES = {
    SpeculationKind.PROMPT_LOOKUP: "the text",
    SpeculationKind.DRAFT_MODEL: "the draft model",
    SpeculationKind.BOTH: "both",
}


@dataclass(slots=True)
class Case:
    """One prompt, one way to choose, so many sequences, one source of drafts: the runs without and with drafts, in turns."""

    prompt: str
    sampling: str
    sequences: int
    source: SpeculationKind = SpeculationKind.PROMPT_LOOKUP
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
            _SOURCES[self.source],
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
    template = PROMPTS[kind]
    texts = [template.format(PLACES[number % len(PLACES)]) + " " * (number // len(PLACES)) for number in range(sequences)]
    if tokenizer.chat is None:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.encode_plain(tokenizer.chat.render([Message("user", text)])) for text in texts]


def grammar_of(kind: str, runner: ModelRunner, tokenizer: Tokenizer) -> CompiledGrammar | None:
    """What outputs of this kind are held to."""
    if kind != "record":
        return None
    vocabulary = Vocabulary(tokenizer.token_bytes, runner.vocabulary_size, tokenizer.eos_ids)
    rule = GrammarRule(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return load(save(compile_rule(rule, vocabulary)), rule, vocabulary)


def measure(
    case: Case,
    sides: Sequence[Decoding],
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    rounds: int,
    grammar: CompiledGrammar | None = None,
) -> None:
    """Rounds of both sides; both say the same, or the figures mean nothing."""
    plain, drafting = sides
    asked = (prompts, SAMPLINGS[case.sampling], output_tokens, grammar)
    for side in sides:
        side.run(*asked)
    for _ in range(rounds):
        for side, runs in ((plain, case.plain), (drafting, case.drafted)):
            before = read_cpu_times()
            runs.append(side.run(*asked))
            case.disturbed += between(before, read_cpu_times(), (os.getpid(),)).disturbed
        if case.plain[-1].outputs != case.drafted[-1].outputs:
            raise AssertionError(f"{case.prompt}, {case.sampling}, {case.sequences} sequences: drafts changed what was said")


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: an engine, its tokenizer, and where drafts come from."""

    runner: ModelRunner
    tokenizer: Tokenizer
    draft_tokens: int
    drafter: DraftModel | None
    model: str

    @property
    def sources(self) -> tuple[SpeculationKind, ...]:
        """The kinds that rows are made for."""
        from_text = (SpeculationKind.PROMPT_LOOKUP,)
        return from_text if self.drafter is None else (*from_text, SpeculationKind.DRAFT_MODEL, SpeculationKind.BOTH)

    def side(self, kind: SpeculationKind) -> Decoding:
        """An engine thread that drafts so."""
        limits = SchedulerLimits(
            step=StepLimits(tokens=512, sequences=64), speculation=SpeculationLimits(kind, self.draft_tokens)
        )
        drafter = self.drafter if kind.asks_model else None
        drafts = drafts_for(drafter, self.model, self.runner, self.tokenizer, DRAFT_STEP_TOKENS)
        return Decoding(self.runner, limits, self.tokenizer.detokeniser, drafts)

    def cases(self, counts: Sequence[int]) -> Iterator[Case]:
        """One for each kind of prompt, way to choose, number of sequences and source of drafts."""
        for prompt, sampling, count, source in itertools.product(PROMPTS, SAMPLINGS, counts, self.sources):
            yield Case(prompt, sampling, count, source)


def bench_drafts(
    sequences: Annotated[str, typer.Option(help="Sequences beside one another.")] = "1,8",
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each sequence, at most.")] = 160,
    draft_tokens: Annotated[int, typer.Option(min=1, max=64, help="As the setting of a decode member.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Of the engine.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turns, after one that is not counted.")] = 5,
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    draft_model: Annotated[str, typer.Option(help="Rows with drafts of this model too.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    write: Annotated[bool, typer.Option("--write", help="Put the table into bench/README.md.")] = False,
) -> None:
    """Prompts that ask for copies, for a JSON object and for a text, with drafts and without, on one decode engine."""
    counts = [int(count) for count in sequences.split(",")]
    ref = models.resolve(model)
    pages = 1 + max(counts) * pages_for(512 + output_tokens, PAGE_TOKENS)
    settings = {"dtype": dtype, "page_tokens": PAGE_TOKENS, "total_pages": pages, "threads": threads}
    runner, drafter = ModelRunner.load(ref, **settings), None
    if draft_model:
        small = models.resolve(draft_model)
        drafter = DraftModel(small.name, ModelRunner.load(small, **settings), models.load_tokenizer(small))
    bench = Bench(runner, models.load_tokenizer(ref), draft_tokens, drafter, ref.name)
    tell = Console(stderr=True, highlight=False)
    rows = []
    for case in bench.cases(counts):
        sides = [bench.side(kind) for kind in (SpeculationKind.OFF, case.source)]
        prompts = prompts_of(case.prompt, case.sequences, bench.tokenizer)
        measure(case, sides, prompts, output_tokens, rounds, grammar_of(case.prompt, runner, bench.tokenizer))
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

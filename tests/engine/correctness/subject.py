"""What is compared in one column: its engine, its reference, members over the one and the judgement by the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from engine.adapters import AdapterFolder
from engine.batch import Batch, LayerMarks
from engine.grammar_library import CompiledGrammar
from engine.log_probs import TokenLogProb
from engine.quantisation import WeightQuantisation, quantise
from engine.runner import ModelError, Runner, RunnerStatistics
from engine.sampling_params import SamplingParams
from lifecycle.finish import FinishReason
from lifecycle.prefix_keys import adapted_salt
from models import ModelRef
from tests.engine import adapter_files, tiny_models
from tests.engine.adapter_files import merged, opened, write
from tests.engine.correctness.columns import WITHOUT_ADAPTERS, Column, Comparison, Family
from tests.engine.correctness.reference import Reference, Request
from tests.engine.decoding import Ask, Member
from tests.engine.tiny_models import VOCABULARY, prompt
from tests.grammars import bytes_vocabulary, compiled, regex

OUTPUT_TOKENS = 24
#: Of each KV group, the null page included.
TOTAL_PAGES = 128
#: Log-probabilities that are told beside the chosen token's.
TOP = 2
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=11)
EDITED = SamplingParams(
    temperature=0.8, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 2.0), (7, 2.0)), seed=5
)
ADAPTERS = {
    "one": adapter_files.Tiny(3, size=0.2),
    "two": adapter_files.Tiny(2, ("q_proj", "v_proj", "o_proj", "down_proj"), rank=3, size=0.2),
}
#: Most that a log-probability may differ from the reference's, as a share of the output's largest logit.
#: Measured on one CPU: 1e-6 and 0.012 to 0.033; what one wrong page or seed does is far above.
BOUND = {"float32": 1e-5, "bfloat16": 0.08}
#: Most that a drawn number may be outside the reference's share of its token. Measured: 0, and 0.004 to 0.075.
SHARE_BOUND = {"float32": 1e-5, "bfloat16": 0.1}


@cache
def letters(allowed: frozenset[int], count: int) -> CompiledGrammar:
    """So many of these letters, in a vocabulary whose ids are bytes. `allowed`: without gaps."""
    return compiled(regex(f"[{chr(min(allowed))}-{chr(max(allowed))}]{{{count}}}"), bytes_vocabulary(VOCABULARY))


@dataclass
class Said:
    """What came of a request: tokens, what was told with them, and how it ended."""

    tokens: list[int]
    log_probs: list[TokenLogProb]
    reason: FinishReason | None


class VirtualClock:
    """Implements rpc.clocks.Clocks: stands still until it is told otherwise, so that nothing depends on how fast steps are."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """See Clocks."""
        return self.now

    def wall(self) -> float:
        """See Clocks."""
        return self.now


class WatchedRunner:
    """A runner behind the port: writes down what it is given, and has no memory for a step while it is told so."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.batches: list[Batch] = []
        self.out_of_memory = False
        self.layout = runner.layout
        self.vocabulary_size = runner.vocabulary_size
        self.context_tokens = runner.context_tokens
        self.adapters = runner.adapters
        self.slabs = runner.slabs
        self.slab_data = runner.slab_data

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        """See Runner."""
        self.batches.append(batch)
        if self.out_of_memory:
            raise ModelError("no memory")
        return self._runner.run(batch, marks)

    def rest(self) -> None:
        """See Runner."""
        self._runner.rest()

    def statistics(self) -> RunnerStatistics:
        """See Runner."""
        return self._runner.statistics()


@dataclass
class Tiny:
    """A family's files, with weights that bfloat16 holds exactly, and the references over the same weights, as they are and as
    int8 keeps them; for each way one of each adapter, by name, the empty one's being the model's."""

    ref: ModelRef
    references: Mapping[WeightQuantisation, Mapping[str, Reference]]
    adapters: tuple[AdapterFolder, ...]

    @classmethod
    def build(cls, family: Family, folder: Path) -> "Tiny":
        """Saves the files in a folder."""
        model, dequantised = (tiny_models.build(family.variant, **dict(family.changes)) for _ in range(2))
        with torch.no_grad():
            for each in (model, dequantised):
                for parameter in each.parameters():
                    parameter.copy_(parameter.to(torch.bfloat16))
            described = {} if family.name in WITHOUT_ADAPTERS else ADAPTERS
            adapters = opened({name: write(folder / name, one, model) for name, one in described.items()})
            for linear in [one for one in dequantised.modules() if isinstance(one, torch.nn.Linear)]:
                small = quantise(linear.weight)
                # A parameter of its own: an embedding that shares the head's matrix stays as it is.
                linear.weight = torch.nn.Parameter(small.values.float() * small.scales[:, None])
            references = {
                how: {"": Reference(base), **{name: Reference(merged(base, one)) for name, one in described.items()}}
                for how, base in ((WeightQuantisation.OFF, model), (WeightQuantisation.INT8, dequantised))
            }
        return cls(tiny_models.save(model, folder / "model"), references, adapters)


@dataclass
class Subject:
    """One column at work. `other`, and `apart` for what is said alone: the same weights again, with pages of their own."""

    column: Column
    references: Mapping[str, Reference]
    runner: Runner
    other: Runner
    apart: Runner
    clock: VirtualClock = field(default_factory=VirtualClock)
    _alone: dict[Request, Said] = field(default_factory=dict)

    @classmethod
    def load(cls, column: Column, tiny: Tiny) -> "Subject":
        """Loads the engine three times."""
        engine = column.engine
        settings: dict[str, Any] = {"dtype": engine.dtype, "backend": engine.backend, "page_tokens": engine.page_tokens}
        settings |= {"weight_quantisation": engine.weights.value, "adapters": tiny.adapters}
        runners = [tiny_models.load(tiny.ref, total_pages=TOTAL_PAGES, **settings) for _ in range(3)]
        return cls(column, tiny.references[engine.weights], *runners)

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of every group."""
        return self.column.engine.page_tokens

    @property
    def keeps_all_pages(self) -> bool:
        """Whether some KV group has no window, so that a sequence needs pages for all of its tokens."""
        return any(group.window is None for group in self.runner.layout.groups)

    def requests(self) -> list[Request]:
        """Five, of lengths at, below and above the borders of pages, greedy and drawn."""
        size = self.page_tokens
        lengths = (1, size, 2 * size + 1, size + 2, 2 * size - 1)
        samplings = (GREEDY, SEEDED, GREEDY, EDITED, SEEDED)
        return [
            Request(tuple(prompt(length, seed=length)), sampling, OUTPUT_TOKENS)
            for length, sampling in zip(lengths, samplings, strict=True)
        ]

    def adapted(self) -> list[Request]:
        """The same five, of the adapters and of none."""
        names = ("", "one", "two", "", "one")
        return [replace(request, adapter=name) for request, name in zip(self.requests(), names, strict=True)]

    def pages(self, request: Request, step_tokens: int) -> int:
        """Most pages of any group that a request holds at once, where its prompt is computed in steps of so many tokens."""
        tokens = len(request.prompt) + request.output_tokens - 1
        return max(group.most_pages(tokens, step_tokens) for group in self.runner.layout.groups)

    def watched(self) -> WatchedRunner:
        """The runner, behind something that writes down its batches."""
        return WatchedRunner(self.runner)

    def member(self, step: StepLimits | None = None, runner: Runner | None = None, **settings: Any) -> Member:
        """A decode member with its books empty. `settings`: of SchedulerLimits where it has such a field, else of Member."""
        of_limits = {name: settings.pop(name) for name in ("pressure", "speculation") if name in settings}
        limits = SchedulerLimits(step=step or StepLimits(tokens=60, sequences=8), **of_limits)
        return Member(runner or self.runner, limits, log_probs=TOP, **settings)

    def ask(self, member: Member, request: Request, **more: Any) -> int:
        """Put a request to a member. One with a grammar may say more than the grammar lets it. `more`: as in Ask."""
        more.setdefault("indexes", (request.index,))
        if request.adapter and "salt" in more:
            more["salt"] = adapted_salt(more["salt"], next(one for one in self.runner.adapters if one.name == request.adapter))
        grammar = None if request.allowed is None else letters(request.allowed, request.output_tokens)
        most = request.output_tokens + (grammar is not None)
        return member.ask(Ask(request.prompt, request.sampling, most, grammar=grammar, adapter=request.adapter, **more))

    def said(self, member: Member, seat: int) -> Said:
        """What came of a seat so far."""
        end = member.ends.get(seat)
        return Said(member.tokens[seat], member.log_probs[seat], end.ending.reason if end else None)

    def serve(self, member: Member, requests: Sequence[Request]) -> list[Said]:
        """All of them beside one another, judged; afterwards the member holds nothing."""
        seats = [self.ask(member, request) for request in requests]
        member.run()
        for seat, request in zip(seats, requests, strict=True):
            self.judge_whole(member, seat, request)
        member.assert_at_rest()
        return [self.said(member, seat) for seat in seats]

    def alone(self, request: Request) -> Said:
        """What this engine says to a request that has a member for itself; computed once."""
        if request not in self._alone:
            # Not on the pages of a member that is in the middle of its work.
            member = self.member(runner=self.apart)
            seat = self.ask(member, request)
            member.run()
            self._alone[request] = self.said(member, seat)
        return self._alone[request]

    def judge_whole(self, member: Member, seat: int, request: Request, earlier: Sequence[int] = ()) -> None:
        """A seat's output went to its end, and is right."""
        said = self.said(member, seat)
        assert said.reason is FinishReason.MAX_OUTPUT_TOKENS
        assert len(earlier) + len(said.tokens) == request.output_tokens
        self.judge(said, request, earlier)

    def judge(self, said: Said, request: Request, earlier: Sequence[int] = ()) -> None:
        """What was said so far is right, as the column compares. `earlier`: tokens that another member said before."""
        first, tokens = len(earlier), (*earlier, *said.tokens)
        reference = self.references[request.adapter]
        assert len(said.log_probs) == len(said.tokens)
        match self.column.engine.comparison:
            case Comparison.REFERENCE:
                assert list(tokens) == reference.chosen(request, tokens)
            case Comparison.ALONE:
                alone = self.alone(request)
                assert list(tokens) == alone.tokens[: len(tokens)]
                assert said.log_probs == alone.log_probs[first : len(tokens)]
            case Comparison.NEAR:
                pass
        if not said.tokens:
            return
        rows = reference.rows(request, tokens)
        dtype = self.column.engine.dtype
        bound = BOUND[dtype] * float(rows.abs().max())
        assert max(reference.misses(request, tokens)) <= (bound if request.sampling.greedy else SHARE_BOUND[dtype])
        expected = torch.log_softmax(rows.double(), dim=-1)[first:]
        own = expected.gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        assert (torch.tensor([told.value for told in said.log_probs]) - own).abs().max() <= bound
        best = torch.tensor([told.top_values for told in said.log_probs])
        assert (best - expected.topk(TOP).values).abs().max() <= bound

"""Small vocabularies and short ways to drive a sequence, for the sequence tests."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceSpec, Step, StopSpec
from lifecycle.finish import Ending
from lifecycle.record import AttemptKey
from text.detokeniser import Detokeniser, Utf8Policy, plain_table
from text.stop_matcher import StopRules

KEY = AttemptKey("r", 1)
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Case:
    """What differs between tests; the rest is the same everywhere."""

    vocabulary: tuple[bytes, ...]
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    least: int = 0
    most: int = 100
    context: int = 1_000
    prompt: tuple[int, ...] = (1, 2, 3)
    policy: Utf8Policy | None = None
    sampling: SamplingParams = field(default=GREEDY)

    def spec(self) -> SequenceSpec:
        rules = StopRules(tuple(stop.encode() for stop in self.stops), self.include_stop)
        stop = StopSpec(rules, self.stop_ids, self.eos_ids, self.ignore_eos, self.least)
        return SequenceSpec(KEY, 0, self.prompt, self.sampling, stop, self.most, self.context, self.policy)

    def start(self) -> Sequence:
        """A sequence whose prompt is in the cache."""
        sequence = Sequence(self.spec(), partial(Detokeniser, plain_table(self.vocabulary)))
        sequence.completed(len(self.prompt))
        return sequence


def feed(sequence: Sequence, token: int, now: float = 0.0, ended: Ending | None = None) -> Step:
    """One turn: the token that waits is fed, then the next is chosen."""
    if sequence.waiting:
        fed, position = sequence.next_input()
        assert fed == sequence.output_token_ids[-1]
        assert position == sequence.cache_tokens == len(sequence.spec.prompt_token_ids) + sequence.selected_tokens - 1
        sequence.completed(1)
    return sequence.choose(token, now, ended)


def run(case: Case, tokens: Items[int]) -> tuple[Sequence, list[Step]]:
    """Feed tokens until they are used up or the output ends."""
    sequence = case.start()
    steps = []
    for token in tokens:
        steps.append(feed(sequence, token))
        if steps[-1].ending is not None:
            break
    return sequence, steps


def text_of(steps: Items[Step]) -> str:
    return b"".join(step.text for step in steps).decode()


def ids_of(steps: Items[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]

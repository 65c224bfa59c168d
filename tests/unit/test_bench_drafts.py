"""The table of what drafts bring, and the engine that is driven for it."""

import pytest

from bench.decoding import Decoded, Decoding
from bench.drafts import COLUMNS, PROMPTS, SAMPLINGS, Case, measure, prompts_of
from decode_svc.scheduler import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.prompt_lookup import LookupLimits
from rpc import clocks
from tests.scripted import ScriptedRunner, ScriptedTokenizer


def decoded(seconds: float, steps: int, drafted: int = 0, accepted: int = 0) -> Decoded:
    return Decoded(((1,) * 11, (2,) * 11), seconds, steps, drafted, accepted)


def test_a_row_is_the_median_of_the_rounds_ratios() -> None:
    case = Case("copying", "greedy", 2)
    case.plain = [decoded(2.0, 10), decoded(4.0, 10), decoded(2.0, 10)]
    case.drafted = [decoded(1.0, 5, 20, 12), decoded(1.0, 5, 20, 12), decoded(1.0, 5, 20, 12)]
    row = dict(zip(COLUMNS, case.row(), strict=True))
    assert (row["tokens/s without"], row["tokens/s with"], row["speed-up"]) == ("10.0", "20.0", "**2.00**")
    assert (row["worst and best round"], row["tokens a step"], row["drafts accepted"]) == ("2.00 to 4.00", "2.00", "60% of 20")
    case.drafted = [decoded(2.0, 10)] * 3
    assert case.row()[COLUMNS.index("drafts accepted")] == "none drafted"


class Ticking:
    """Implements rpc.clocks.Clocks: a millisecond passes from one look to the next, so that all steps take alike."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    wall = monotonic


def test_both_sides_are_driven_to_the_same_outputs() -> None:
    tokenizer = ScriptedTokenizer()
    cycle = b"over and "
    runner = ScriptedRunner(tokenizer.vocabulary_size, otherwise=lambda history: cycle[len(history) % len(cycle)])
    sides = []
    for kind in (SpeculationKind.OFF, SpeculationKind.PROMPT_LOOKUP):
        limits = SchedulerLimits(speculation=SpeculationLimits(kind, 6, LookupLimits(2, 4)))
        sides.append(Decoding(runner, limits, tokenizer.detokeniser))
    case = Case("copying", "greedy", 2)
    with clocks.replaced_by(Ticking()):  # whether drafts pay hangs on how long steps take
        measure(case, sides, [[1, 2, 3], [4, 5, 6, 7]], 40, 2)
    assert len(case.plain) == len(case.drafted) == 2
    assert all(run.drafted_tokens == 0 and run.steps >= 39 for run in case.plain)
    assert all(run.accepted_tokens > 20 and run.steps < 30 for run in case.drafted)
    assert [len(output) for run in case.drafted for output in run.outputs] == [40] * 4


def test_what_was_changed_by_drafts_is_not_measured() -> None:
    class Different:
        def __init__(self, token: int) -> None:
            self.token = token

        def run(self, prompts: object, sampling: object, output_tokens: int, grammar: object) -> Decoded:
            return Decoded(((self.token,) * output_tokens,), 1.0, 1, 0, 0)

    with pytest.raises(AssertionError, match="drafts changed what was said"):
        measure(Case("copying", "greedy", 1), [Different(1), Different(2)], [[1]], 4, 1)  # type: ignore[list-item]


def test_each_sequence_gets_another_text() -> None:
    class Plain(ScriptedTokenizer):
        chat = None

    for kind in PROMPTS:
        prompts = prompts_of(kind, 20, Plain())  # type: ignore[arg-type]
        assert len({tuple(ids) for ids in prompts}) == 20
    assert set(SAMPLINGS) == {"greedy", "drawn"}

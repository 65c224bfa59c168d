"""Several outputs of one prompt by a real (tiny, random) model: each says what it would say alone, with its index."""

from collections.abc import Sequence

import pytest
import torch

from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, PressureLimits, Reservation
from decode_svc.scheduler import SchedulerLimits
from engine.sampling_params import SamplingParams
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.decoding import Ask, Member
from tests.engine.native_sets import needs_compiler
from tests.engine.tiny_models import prompt

pytestmark = pytest.mark.slow

PAGE_TOKENS = 4
OUTPUT_TOKENS = 24
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=11)
#: With a page that all share, without one, and at the borders of pages.
LENGTHS = (1, 4, 6, 17)


@pytest.fixture(params=["qwen3", "gemma3", "deepseek-v3"], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    return tiny_models.save(tiny_models.build(request.param), tmp_path_factory.mktemp(request.param))


def choices(member: Member, ids: Sequence[int], indexes: Sequence[int]) -> list[list[int]]:
    """The tokens of each of these outputs of one prompt, made beside one another, and beside what runs already."""
    first = member.ask(Ask(ids, DRAWN, OUTPUT_TOKENS, indexes=indexes))
    member.run()
    member.assert_at_rest()
    return [member.tokens[first + place] for place in range(len(indexes))]


def limits_of(kind: PreemptionKind | None = None) -> SchedulerLimits:
    pressure = PressureLimits() if kind is None else PressureLimits(Reservation.EXPECTED, kind)
    return SchedulerLimits(step=StepLimits(tokens=12, sequences=3, prompts=2), pressure=pressure)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_output_is_what_it_is_alone(tiny: ModelRef, length: int) -> None:
    ids = prompt(length, seed=length)
    load = {"page_tokens": PAGE_TOKENS, "total_pages": 120}
    together = choices(Member(tiny_models.load(tiny, **load), limits_of()), ids, range(4))
    alone = [choices(Member(tiny_models.load(tiny, **load), limits_of()), ids, [index])[0] for index in range(4)]
    assert together == alone and len({tuple(tokens) for tokens in together}) == 4
    assert together[0] == Member(tiny_models.load(tiny, **load), limits_of()).say([ids], DRAWN, OUTPUT_TOKENS)[0]


@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_outputs_that_lose_their_pages_one_by_one_go_on_as_they_were(tiny: ModelRef, kind: PreemptionKind) -> None:
    ids = prompt(9, seed=9)

    def member(total_pages: int) -> Member:
        runner = tiny_models.load(tiny, page_tokens=PAGE_TOKENS, total_pages=total_pages)
        made = Member(runner, limits_of(kind), host_pages=40 if kind is PreemptionKind.SWAP else 0)
        for _ in range(8):
            made.scheduler.preemption.estimate.add(1)
        return made

    tight = member(36)
    for seed in (10, 11):  # two more, so that there is too little for all
        tight.ask(Ask(prompt(12, seed=seed), DRAWN, 60, priority=1))
    tight.turn()
    said = choices(tight, ids, range(4))
    assert sum(tight.scheduler.preemption.counts.preempted.values()) >= 2
    assert said == choices(member(200), ids, range(4))


@needs_compiler
def test_on_the_native_backend_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_models.build("qwen3", head_dim=96, num_attention_heads=3, num_key_value_heads=3).to(torch.bfloat16)
    ref = tiny_models.save(model, tmp_path_factory.mktemp("native"))
    settings = {"page_tokens": 16, "total_pages": 60, "dtype": "bfloat16", "backend": "native"}
    for length in (5, 16, 40):
        ids = prompt(length, seed=length)
        together = choices(Member(tiny_models.load(ref, **settings), limits_of()), ids, range(4))
        alone = [choices(Member(tiny_models.load(ref, **settings), limits_of()), ids, [index])[0] for index in range(4)]
        assert together == alone and len({tuple(tokens) for tokens in together}) == 4

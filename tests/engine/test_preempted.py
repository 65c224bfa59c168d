"""Log-probabilities of prompts and outputs of a real (tiny, random) model, in float32, preempted between two of them.

That preempted sequences say what they would have said alone is in the correctness matrix.
"""

import pytest
import torch
from transformers import PreTrainedModel

from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, PressureLimits, Reservation
from decode_svc.scheduler import SchedulerLimits
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.decoding import Member
from tests.engine.tiny_models import prompt

PAGE_TOKENS = 4
#: 20 pages; each of the sequences below needs up to 12.
SMALL = 21
OUTPUT_TOKENS = 30
HOST_PAGES = 24
PROMPTS = [prompt(length, seed=length) for length in (1, 4, 9, 17, 6)]
TOP = 3
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=11)

Tiny = tuple[PreTrainedModel, ModelRef]


@pytest.fixture(params=["qwen3", "gemma3", "deepseek-v3"], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    model = tiny_models.build(request.param)
    return model, tiny_models.save(model, tmp_path_factory.mktemp(request.param))


def member_of(runner: ModelRunner, kind: PreemptionKind) -> Member:
    """With an estimate that outputs are short."""
    pressure = PressureLimits(Reservation.EXPECTED, kind)
    limits = SchedulerLimits(step=StepLimits(tokens=12, sequences=3, prompts=2), pressure=pressure)
    member = Member(runner, limits, host_pages=HOST_PAGES if kind is PreemptionKind.SWAP else 0, log_probs=TOP)
    for _ in range(8):
        member.scheduler.preemption.estimate.add(1)
    return member


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_c8_log_probabilities_are_those_of_the_reference_preempted_or_not(tiny: Tiny, kind: PreemptionKind) -> None:
    """Before temperature, penalties and filters of the request, which the draw goes by."""
    member = member_of(tiny_models.load(tiny[1], page_tokens=PAGE_TOKENS, total_pages=SMALL), kind)
    said = member.say(PROMPTS, SAMPLED, OUTPUT_TOKENS, scores_prompts=True)
    assert sum(member.scheduler.preemption.counts.preempted.values()) >= 3
    for seat, ids in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = tiny[0](torch.tensor([[*ids, *said[seat]]])).logits[0].to(torch.float64)
        expected, tokens = torch.log_softmax(logits, dim=-1)[:-1], [*ids, *said[seat]][1:]
        known = [*member.prompt_log_probs.get(seat, []), *member.log_probs[seat]]
        assert len(member.log_probs[seat]) == OUTPUT_TOKENS
        for row, token, told in zip(expected, tokens, known, strict=True):
            assert told.value == pytest.approx(float(row[token]), abs=1e-4)
            assert told.top_values == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)

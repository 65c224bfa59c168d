"""Preempted and resumed sequences of a real (tiny, random) model say what they would have said alone, in float32."""

from collections.abc import Sequence

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
from tests.engine.native_sets import needs_compiler
from tests.engine.tiny_models import prompt
from tests.reference import greedy

PAGE_TOKENS = 4
#: 20 pages; each of the sequences below needs up to 12.
SMALL, LARGE = 21, 200
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


def outputs(ref: ModelRef, kind: PreemptionKind, total_pages: int, sampling: SamplingParams) -> tuple[Sequence[list[int]], int]:
    """What was said, and how many times a sequence was preempted."""
    member = member_of(tiny_models.load(ref, page_tokens=PAGE_TOKENS, total_pages=total_pages), kind)
    said = member.say(PROMPTS, sampling, OUTPUT_TOKENS)
    counts = member.scheduler.preemption.counts
    if kind is PreemptionKind.SWAP:
        assert counts.preempted[PreemptionKind.SWAP], "the host area was never used"
    return said, sum(counts.preempted.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_greedy_tokens_are_the_references(tiny: Tiny, kind: PreemptionKind) -> None:
    said, preempted = outputs(tiny[1], kind, SMALL, SamplingParams(temperature=0.0))
    assert preempted >= 3
    assert said == [greedy(tiny[0], ids, OUTPUT_TOKENS) for ids in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_b45_sampled_tokens_go_on_at_the_same_place_of_the_seed(tiny: Tiny, kind: PreemptionKind) -> None:
    said, preempted = outputs(tiny[1], kind, SMALL, SAMPLED)
    undisturbed, none = outputs(tiny[1], PreemptionKind.RECOMPUTE, LARGE, SAMPLED)
    assert preempted >= 3 and none == 0
    assert said == undisturbed


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


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_c8_log_probabilities_are_the_same_bit_by_bit_alone_and_in_a_batch(
    tmp_path_factory: pytest.TempPathFactory, kind: PreemptionKind
) -> None:
    """On the backend whose logits are: so also when a sequence was preempted between two tokens."""
    model = tiny_models.build("qwen3", head_dim=96, num_attention_heads=3, num_key_value_heads=3).to(torch.bfloat16)
    ref = tiny_models.save(model, tmp_path_factory.mktemp("native"))

    def member(total_pages: int) -> Member:
        settings = {"page_tokens": 16, "total_pages": total_pages, "dtype": "bfloat16", "backend": "native"}
        return member_of(tiny_models.load(ref, **settings), kind)

    together = member(7)  # each needs up to three
    said = together.say(PROMPTS, SAMPLED, OUTPUT_TOKENS)
    assert sum(together.scheduler.preemption.counts.preempted.values()) >= 3
    for seat, ids in enumerate(PROMPTS):
        alone = member(LARGE)
        assert alone.say([ids], SAMPLED, OUTPUT_TOKENS) == [said[seat]]
        assert alone.log_probs[0] == together.log_probs[seat]

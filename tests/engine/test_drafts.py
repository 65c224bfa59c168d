"""Drafted tokens of real (tiny, random) models: rows of drafts have the bits of rows alone, and outputs are the plain loop's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.batch import Rows
from engine.native.instruction_sets import PLAIN, sets_here
from engine.prompt_lookup import LookupLimits
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.decoding import Ask, Known, Member
from tests.engine.native_sets import has_compiler, only
from tests.engine.tiny_models import VOCABULARY, Driver, prompt
from tests.grammars import bytes_vocabulary, compiled, regex

pytestmark = pytest.mark.slow

OUTPUT_TOKENS = 24
PROMPTS = [prompt(length, seed=length) for length in (1, 15, 16, 33)]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=11),
    "all of it": SamplingParams(
        temperature=0.8, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 2.0), (7, 2.0)), seed=5
    ),
}
#: Backends, with the instruction sets of the native one.
BACKENDS = [
    "float32",
    "bfloat16 torch",
    *(f"bfloat16 {each.name}" for each in sets_here() if each is not PLAIN and has_compiler()),
]


@pytest.fixture(scope="module")
def ref(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    model = tiny_models.build("qwen3", head_dim=32)
    return tiny_models.save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, ref: ModelRef) -> ModelRunner:
    dtype, _, backend = request.param.partition(" ")
    if backend in ("", "torch"):
        return tiny_models.load(ref, total_pages=200, dtype=dtype, backend="torch")
    (instructions,) = (each for each in sets_here() if each.name == backend)
    return tiny_models.load(ref, total_pages=200, dtype=dtype, registry=only(instructions))


def drafted(driver: Driver, name: str, ids: list[int], drafts: int) -> Rows:
    """The rows of a sequence that goes on with ids, of which all but the first are drafts."""
    rows = driver.rows(name, ids)
    return Rows(rows.sequence, rows.token_ids, rows.first_position, rows.pages, True, draft_tokens=drafts)


def test_rows_of_drafts_have_the_bits_of_rows_alone(runner: ModelRunner) -> None:
    alone, together = Driver(runner), Driver(runner)
    together.pages = alone.pages
    expected = []
    for length in (3, 14, 30):
        ids = prompt(length + 7, seed=2)
        for driver in (alone, together):
            driver.feed(f"{length}", ids[:length])
        expected += [alone.feed(f"{length}", [token]) for token in ids[length:]]
    rows = [drafted(together, f"{length}", prompt(length + 7, seed=2)[length:], 6) for length in (3, 14, 30)]
    other = together.rows("other", prompt(21))
    logits = together.step(rows[0], other, *rows[1:])
    got = torch.cat((logits[:7], logits[8:]))
    assert got.shape == (21, VOCABULARY)
    assert torch.equal(got.view(torch.int32), torch.stack(expected).view(torch.int32))


def test_rejected_rows_leave_nothing_behind(runner: ModelRunner) -> None:
    """Behind wrong drafts, over a page's border, a sequence reads what it reads without them."""
    driver = Driver(runner)
    ids = prompt(30, seed=4)
    driver.feed("plain", ids[:13])
    driver.feed("drafting", ids[:13])
    for place in range(13, 30):
        expected = driver.feed("plain", ids[place : place + 1])
        logits = driver.step(drafted(driver, "drafting", [ids[place], 1, 2, 3, 4], 4))
        driver.done["drafting"] = place + 1
        assert torch.equal(logits[0].view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_outputs_are_those_of_the_plain_loop(runner: ModelRunner, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    limits = SchedulerLimits(step=StepLimits(tokens=60, sequences=4), speculation=SpeculationLimits(draft_tokens=7))
    plain = [Member(runner, limits, log_probs=2) for _ in PROMPTS]
    alone = [member.say([ids], params, OUTPUT_TOKENS)[0] for member, ids in zip(plain, PROMPTS, strict=True)]
    mistakes: list[Callable[[int], bool]] = [lambda place: place % 9 == 8, lambda place: place % 3 == 0]
    for wrong in mistakes:
        drafting = Member(runner, limits, drafts=Known(alone, VOCABULARY, wrong), log_probs=2)
        assert drafting.say(PROMPTS, params, OUTPUT_TOKENS) == alone
        assert [drafting.log_probs[seat] for seat in range(len(PROMPTS))] == [member.log_probs[0] for member in plain]
        assert drafting.scheduler.speculation.counts.accepted_tokens
    assert drafting.scheduler.speculation.counts.accepted_tokens < drafting.scheduler.speculation.counts.drafted_tokens


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_outputs_with_grammars_are_those_of_the_plain_loop(runner: ModelRunner, sampling: str) -> None:
    """Alone, in a batch with one that has no grammar, and several of one prompt."""
    params, limits = SAMPLINGS[sampling], SchedulerLimits(speculation=SpeculationLimits(draft_tokens=7))
    words = compiled(regex("([a-c]{2}(xyz)?[0-9]*){1,9}"), bytes_vocabulary(VOCABULARY))
    asks = [Ask(ids, params, OUTPUT_TOKENS, words, indexes=(0, 1, 2)) for ids in PROMPTS[1:]] + [Ask(PROMPTS[0], params, 9)]
    alone = []
    for ask in asks:
        for index in ask.indexes:
            member = Member(runner, limits, log_probs=2)
            seat = member.ask(replace(ask, indexes=(index,)))
            member.run()
            alone.append((member.tokens[seat], member.log_probs[seat], member.ends[seat].ending))
    known = Known([tokens for tokens, _, _ in alone], VOCABULARY, lambda place: place % 5 == 4)
    drafting = Member(runner, limits, drafts=known, log_probs=2)
    for ask in asks:
        drafting.ask(ask)
    drafting.run()
    drafting.assert_at_rest()
    drafting.worker.close()
    for seat, said in enumerate(alone):
        assert (drafting.tokens[seat], drafting.log_probs[seat], drafting.ends[seat].ending) == said
    counts = drafting.scheduler.speculation.counts
    assert 0 < counts.accepted_tokens < counts.drafted_tokens


def test_outputs_with_prompt_lookup(runner: ModelRunner) -> None:
    """Greedy outputs of a random model repeat themselves, so that looking back finds something."""
    lookup = SpeculationLimits(SpeculationKind.PROMPT_LOOKUP, 6, LookupLimits(1, 3))
    params = SAMPLINGS["greedy"]
    prompts = [prompt(9, seed=1) * 3, prompt(12, seed=3)]
    plain = Member(runner, SchedulerLimits()).say(prompts, params, 60)
    drafting = Member(runner, SchedulerLimits(speculation=lookup))
    assert drafting.say(prompts, params, 60) == plain
    counts = drafting.scheduler.speculation.counts
    assert counts.accepted_tokens and drafting.scheduler.steps < 61

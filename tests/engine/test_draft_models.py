"""A real (tiny, random) model drafts for another one: outputs are the plain loop's, whatever it says, and its pages come back."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from decode_svc.config import DecodeSettings
from decode_svc.draft_loading import drafts_for, load_draft_model
from decode_svc.draft_model import ModelDrafts
from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from lifecycle.finish import Ending
from tests.engine import tiny_models
from tests.engine.decoding import Ask, Member
from tests.engine.native_sets import has_compiler
from tests.engine.tiny_models import VOCABULARY, prompt
from tests.grammars import bytes_vocabulary, compiled, regex
from tests.reference import default_model

pytestmark = pytest.mark.slow

OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=11),
    "penalties": SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.7, logit_bias=((3, 2.0),)),
}
PROMPTS = [prompt(length, seed=length) for length in (1, 15, 16, 33)]
#: Models that draft for one of the first kind, and how many of their drafts are right.
DRAFTERS = {"qwen3": (0.6, 1.0), "llama": (0.0, 0.6), "gemma3": (0.0, 0.6), "deepseek-v2": (0.0, 0.6)}


@dataclass(frozen=True)
class Models:
    """One that is drafted for, and the ones that draft, by name."""

    target: ModelRunner
    drafters: dict[str, ModelRunner]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    # In bfloat16 the native backend says the same in any company, for heads that it can; torch need not, on every processor.
    native = request.param == "bfloat16"
    if native and not has_compiler():
        pytest.skip("no C++ compiler here")
    changes = {"qwen3": {"head_dim": 32}} if native else {}
    refs = {
        name: tiny_models.save(tiny_models.build(name, **changes.get(name, {})), tmp_path_factory.mktemp(name))
        for name in DRAFTERS
    }
    drafters = {name: tiny_models.load(ref, page_tokens=4, total_pages=200, dtype=request.param) for name, ref in refs.items()}
    backend = "native" if native else "torch"
    return Models(tiny_models.load(refs["qwen3"], total_pages=200, dtype=request.param, backend=backend), drafters)


def limits(kind: SpeculationKind = SpeculationKind.DRAFT_MODEL, draft_tokens: int = 5) -> SchedulerLimits:
    return SchedulerLimits(step=StepLimits(tokens=60, sequences=6), speculation=SpeculationLimits(kind, draft_tokens))


def drafting(models: Models, name: str, kind: SpeculationKind = SpeculationKind.DRAFT_MODEL, reads: int = 24) -> Member:
    drafts = ModelDrafts(models.drafters[name], VOCABULARY, reads)
    return Member(models.target, limits(kind), draft_model=drafts, log_probs=2)


def said(member: Member, asks: Sequence[Ask]) -> list[tuple[list[int], object, Ending]]:
    """Tokens, log-probabilities and ends of what is asked for at once; afterwards nothing is held."""
    for ask in asks:
        member.ask(ask)
    member.run()
    member.assert_at_rest()
    member.worker.close()
    return [(member.tokens[seat], member.log_probs[seat], member.ends[seat].ending) for seat in sorted(member.tokens)]


def alone(models: Models, asks: Sequence[Ask]) -> list[tuple[list[int], object, Ending]]:
    """The same of each for itself, without drafts."""
    off = limits(SpeculationKind.OFF)
    one_by_one = [Ask(a.prompt, a.sampling, a.output_tokens, a.grammar, indexes=(i,)) for a in asks for i in a.indexes]
    return [said(Member(models.target, off, log_probs=2), [ask])[0] for ask in one_by_one]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_are_those_of_the_plain_loop(loaded: Models, name: str, sampling: str) -> None:
    asks = [Ask(ids, SAMPLINGS[sampling], OUTPUT_TOKENS) for ids in PROMPTS]
    member = drafting(loaded, name)
    assert said(member, asks) == alone(loaded, asks)
    counts = member.scheduler.speculation.counts
    least, most = DRAFTERS[name]
    assert counts.drafted_tokens and least <= counts.accepted_tokens / counts.drafted_tokens <= most


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_outputs_with_grammars_and_several_of_one_prompt(loaded: Models, name: str) -> None:
    words = compiled(regex("([a-c]{2}(xyz)?[0-9]*){1,9}"), bytes_vocabulary(VOCABULARY))
    asks = [Ask(ids, SAMPLINGS["seeded"], OUTPUT_TOKENS, words) for ids in PROMPTS[:2]]
    asks += [Ask(PROMPTS[2], SAMPLINGS["seeded"], OUTPUT_TOKENS, indexes=(0, 1, 2)), Ask(PROMPTS[3], GREEDY, 9, words)]
    assert said(drafting(loaded, name), asks) == alone(loaded, asks)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_outputs_with_both_sources(loaded: Models, name: str) -> None:
    asks = [Ask(prompt(9, seed=1) * 3, GREEDY, 50), Ask(prompt(12, seed=3), GREEDY, 50)]
    member = drafting(loaded, name, SpeculationKind.BOTH)
    assert said(member, asks) == alone(loaded, asks)
    by_origin = member.scheduler.speculation.counts_by_origin()
    assert [origin.value for origin, counts in by_origin.items() if counts.drafted_tokens] == ["prompt_lookup", "draft_model"]


def test_a_small_memory_serves_who_comes_first(loaded: Models, tmp_path_factory: pytest.TempPathFactory) -> None:
    ref = tiny_models.save(tiny_models.build("qwen3"), tmp_path_factory.mktemp("small"))
    drafter = tiny_models.load(ref, page_tokens=4, total_pages=24)
    asks = [Ask(ids, GREEDY, OUTPUT_TOKENS) for ids in PROMPTS]
    member = drafting(Models(loaded.target, {"small": drafter}), "small", reads=8)
    for ask in asks:
        member.ask(ask)
    most = 0
    while len(member.ends) < len(asks):
        member.turn()
        most = max(most, member.scheduler.books()["draft_sequences"])
    member.assert_at_rest()
    assert 0 < most < len(asks)
    assert [member.tokens[seat] for seat in range(len(asks))] == [tokens for tokens, _, _ in alone(loaded, asks)]


def test_the_model_that_the_settings_name_is_loaded_with_its_own_pages() -> None:
    name = str(default_model().path)
    settings = DecodeSettings(speculation="both", draft_model=name, draft_pages=5, page_tokens=8, threads=1, dtype="float32")
    draft = load_draft_model(settings)
    assert draft is not None and [slab.units for slab in draft.runner.slabs] == [5]
    assert draft.runner.layout.groups[0].page_tokens == 8
    drafts = drafts_for(draft, "itself", draft.runner, draft.tokenizer, settings.draft_step_tokens)
    assert drafts is not None and drafts.check() == [] and drafts.pages == 0
    assert load_draft_model(DecodeSettings()) is None

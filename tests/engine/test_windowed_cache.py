"""The prefix cache with a real (tiny, random) model that has a window in some layers, or in all: what is found changes no bit."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from decode_svc.planning import StepLimits
from decode_svc.scheduler import SchedulerLimits
from engine.sampling_params import SamplingParams
from kv_transfer.memory import MemoryFabric
from lifecycle.prefix_keys import tenant_salt
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.decoding import Ask, Member
from tests.engine.handing_over import PrefillMember
from tests.engine.tiny_models import prompt
from tests.reference import greedy

pytestmark = pytest.mark.slow

PAGE_TOKENS = 4
OUTPUT_TOKENS = 14
SALT, OTHER = tenant_salt("one"), tenant_salt("another")
GREEDY = SamplingParams(temperature=0.0)
LOAD = {"page_tokens": PAGE_TOKENS, "total_pages": 120}


@pytest.fixture(params=["gemma3", "mistral-window"], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ModelRef]:
    model = tiny_models.build(request.param)
    return model, tiny_models.save(model, tmp_path_factory.mktemp(request.param))


def limits_of(step_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(step=StepLimits(tokens=step_tokens, sequences=3, prompts=2))


@pytest.mark.parametrize("length", [6, 9, 13, 30, 47])
def test_a_hit_gives_the_same_bits_as_none(tiny: tuple[PreTrainedModel, ModelRef], length: int) -> None:
    """Prompts shorter and longer than the window, computed in the chunks in which the rest of a found one is."""
    model, ref = tiny
    ids, cached = prompt(length, seed=length), (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    member = Member(tiny_models.load(ref, **LOAD), limits_of(cached), log_probs=2, prefix_cache=True)
    seats = []
    for salt in (SALT, SALT, OTHER):
        seats.append(member.ask(Ask(ids, GREEDY, OUTPUT_TOKENS, salt=salt)))
        member.run()
    assert [member.cached[seat] for seat in seats] == [0, cached, 0]
    for seat in seats:
        assert member.tokens[seat] == greedy(model, ids, OUTPUT_TOKENS)
        assert member.log_probs[seat] == member.log_probs[seats[0]]
    member.assert_at_rest()


def test_two_that_run_side_by_side_share_what_their_windows_show(tiny: tuple[PreTrainedModel, ModelRef]) -> None:
    model, ref = tiny
    member = Member(tiny_models.load(ref, **LOAD), limits_of(64), prefix_cache=True)
    front = prompt(24, seed=3)
    begun = member.ask(Ask([*front, 5], GREEDY, 2 * OUTPUT_TOKENS, salt=SALT))
    member.run(lambda: len(member.tokens[begun]) == 1)
    others = {member.ask(Ask([*front, token], GREEDY, OUTPUT_TOKENS, salt=SALT)): token for token in (7, 9)}
    member.turn()
    assert member.scheduler.memory.pools[-1].owed_pages > 0
    member.run()
    assert member.tokens[begun] == greedy(model, [*front, 5], 2 * OUTPUT_TOKENS)
    for seat, token in others.items():
        assert member.cached[seat] == 24
        assert member.tokens[seat] == greedy(model, [*front, token], OUTPUT_TOKENS)
    member.assert_at_rest()


def test_a_chat_over_two_members_sends_only_new_pages(tiny: tuple[PreTrainedModel, ModelRef]) -> None:
    """Each turn says what the reference says of the whole text; another tenant with the same text is sent all of it."""
    model, ref = tiny
    fabric = MemoryFabric()
    decode = Member(tiny_models.load(ref, **LOAD), limits_of(24), prefix_cache=True, fabric=fabric)
    prefill = PrefillMember(tiny_models.load(ref, **LOAD), fabric, step_tokens=24, prefix_cache=True)

    def turn(text: list[int], salt: bytes) -> tuple[list[int], list[int]]:
        """What is said after a text, and the pages that were sent, by group."""
        seat = decode.ask(Ask(text, GREEDY, OUTPUT_TOKENS, salt=salt, prefill=prefill.peer))
        decode.run(lambda: seat in decode.grants)
        grant = decode.grants[seat]
        prefill.fill(grant, text, salt)
        while seat not in decode.ends:
            prefill.turn()
            decode.turn()
        decode.assert_at_rest()
        return decode.tokens[seat], [sum(page > 0 for page in group.page_ids) for group in grant.groups]

    text: list[int] = []
    for number in range(4):
        known = max(0, len(text) - 1) // PAGE_TOKENS
        text += prompt(7 + number, seed=number)
        said, sent = turn(text, SALT)
        assert said == greedy(model, text, OUTPUT_TOKENS)
        whole = -(-len(text) // PAGE_TOKENS)
        gone = [group.first_page(len(text)) for group in decode.scheduler.memory.groups]
        assert sent == [whole - max(known, first) for first in gone]
        other, all_of_it = turn(text, OTHER if number == 3 else b"")
        assert (other, all_of_it) == (said, [whole - first for first in gone])
        text += said
    found = prefill.scheduler.prefixes.statistics()
    assert found.hit_pages >= found.missed_pages // 2 > 0


def test_what_the_window_lost_is_computed_again(tmp_path: Path) -> None:
    """Its pages are given up for others while the other group keeps its own: nothing is found, and the text is the same."""
    model = tiny_models.build("gemma3")
    runner = tiny_models.load(tiny_models.save(model, tmp_path), **LOAD)
    member = Member(runner, limits_of(64), prefix_cache=True)
    ids = prompt(30, seed=2)
    for cached in (0, 28, 0):
        seat = member.ask(Ask(ids, GREEDY, OUTPUT_TOKENS, salt=SALT))
        member.run()
        assert member.cached[seat] == cached and member.tokens[seat] == greedy(model, ids, OUTPUT_TOKENS)
        if cached:
            pool = member.scheduler.memory.pools[1]
            pool.allocate("others", pool.usable_pages)
            pool.release("others")
    member.assert_at_rest()

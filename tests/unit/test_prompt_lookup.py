"""Drafts looked up in the text: what is found, against a search of everything; the source that keeps a text for each sequence."""

import random

import pytest

from decode_svc.drafts import CATCH_UP_TOKENS, LookupDrafts, Wish
from engine.prompt_lookup import LookupLimits, PromptLookup
from tests.unit.sequence_kit import Case


def plainly(text: list[int], limits: LookupLimits, most: int) -> tuple[int, ...]:
    """The same by looking at every place."""
    for length in range(min(limits.longest, len(text) - 1), limits.shortest - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                found = text[end + 1 : end + 1 + most]
                while len(found) < most:
                    found.append(found[len(found) - (len(text) - end - 1)])
                return tuple(found)
    return ()


@pytest.mark.parametrize("limits", [LookupLimits(1, 1), LookupLimits(1, 4), LookupLimits(2, 5), LookupLimits(3, 3)])
def test_what_is_found_is_the_longest_match_and_of_these_the_newest(limits: LookupLimits) -> None:
    rng = random.Random(limits.longest)
    for _ in range(60):
        text: list[int] = []
        lookup = PromptLookup(limits)
        # Few places share the last tokens, so that none is behind the places that are looked at.
        for _ in range(rng.randint(1, 60)):
            more = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
            lookup.add(tuple(more))
            text += more
            if len(text) > 90:
                break
            assert lookup.propose(6) == plainly(text, limits, 6)
            assert lookup.length == len(text)


def test_the_newest_of_very_many_equal_places_is_found() -> None:
    lookup = PromptLookup(LookupLimits(2, 4))
    lookup.add((7, 8, 9) * 1000)
    lookup.add((1, 2, 7, 8))
    assert lookup.propose(3) == (9, 1, 2)


def test_a_repetition_goes_round() -> None:
    lookup = PromptLookup(LookupLimits(2, 5))
    lookup.add((5, 1, 2, 3, 1, 2))
    assert lookup.propose(7) == (3, 1, 2, 3, 1, 2, 3)
    assert lookup.propose(0) == ()
    assert PromptLookup(LookupLimits()).propose(4) == ()


def test_the_source_follows_each_sequence_and_takes_long_prompts_in_parts() -> None:
    source = LookupDrafts(LookupLimits(2, 4))
    phrase = (11, 12, 13, 14)
    long = Case(vocabulary=(b"x",) * 20, prompt=(*phrase, *range(20, 20 + 2 * CATCH_UP_TOKENS)), context=9999).start()
    short = Case(vocabulary=(b"x",) * 20, prompt=(*phrase, 1, 2), context=9999).start()
    for sequence in (long, short):
        for token in phrase[:2]:
            sequence.choose(token, 0.0)
            if token != phrase[1]:
                sequence.completed(1)
    wishes = [Wish(2, short, 2), Wish(1, long, 2)]
    assert source.propose(wishes) == {2: (13, 14)}
    assert source.propose(wishes) == {2: (13, 14)}, "the long one is being read"
    assert source.propose(wishes) == {2: (13, 14), 1: (13, 14)}
    short.completed(1)
    short.choose(13, 0.0)
    assert source.propose([Wish(2, short, 3)]) == {2: (14, 1, 2)}
    source.forget(2)
    source.forget(77)
    assert source.propose([Wish(2, short, 1)]) == {2: (14,)}, "and it can begin anew"

"""An output with a grammar, token by token: what may follow, how it ends, and how it goes on elsewhere."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine.grammar_library import Vocabulary
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import CanNotGoOn, Earlier, Sequence, SequenceSpec, StopSpec
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from tests.grammars import compiled, regex
from text.detokeniser import Detokeniser, plain_table
from text.stop_matcher import StopRules

ENTRIES = (*(bytes([value]) for value in range(256)), b"ab", b"", b"")
EOS, SPECIAL = 258, 257
VOCABULARY = Vocabulary(plain_table(ENTRIES), len(ENTRIES), frozenset({EOS}))
SAMPLER = Sampler(len(ENTRIES))


def spec(pattern: str, stop: StopSpec | None = None, most: int = 20, context: int = 100, **changes: object) -> SequenceSpec:
    made = SequenceSpec(
        key=AttemptKey("r", 1),
        index=0,
        prompt_token_ids=(1,),
        sampling=SamplingParams(temperature=0.0),
        stop=stop or StopSpec(eos_ids=frozenset({EOS})),
        max_output_tokens=most,
        context_tokens=context,
        grammar=compiled(regex(pattern), VOCABULARY),
    )
    return replace(made, **changes)


def sequence(made: SequenceSpec) -> Sequence:
    one = Sequence(made, partial(Detokeniser, plain_table(ENTRIES)))
    one.completed(len(one.given_token_ids))
    return one


def offered(one: Sequence) -> set[int]:
    """Ids that the sampler can choose from next."""
    logits = torch.zeros((1, len(ENTRIES)))
    found, row = set(), one.sample_row()
    while isinstance(token := SAMPLER.choose(logits, [row])[0], int):
        found.add(token)
        logits[0, token] = -torch.inf
    return found


def say(one: Sequence, tokens: bytes | list[int]) -> Ending | None:
    """Choose tokens, each of which must be offered, up to the end."""
    for token in tokens:
        if one.waiting:
            one.completed(1)
        assert token in offered(one), token
        step = one.choose(token, 0.0)
        if step.ending is not None:
            return step.ending
    if one.waiting:
        one.completed(1)
    return None


def test_an_end_token_is_offered_where_the_text_is_whole() -> None:
    one = sequence(spec("ab?c?"))
    assert offered(one) == {97, 256}
    assert say(one, b"a") is None and offered(one) == {98, 99, EOS}
    assert say(one, [EOS]) == Ending(FinishReason.EOS, matched_token_id=EOS)
    assert one.usage().billed_tokens == 2 and one.usage().returned_tokens == 1


def test_a_complete_grammar_ends_the_output() -> None:
    one = sequence(spec("ab"))
    assert say(one, [256]) == Ending(FinishReason.GRAMMAR_COMPLETE)
    assert one.usage().billed_tokens == one.usage().returned_tokens == 1


def test_limits_come_before_the_grammars_end() -> None:
    assert say(sequence(spec("ab", most=2)), b"ab") == Ending(FinishReason.MAX_OUTPUT_TOKENS)
    assert say(sequence(spec("ab", context=3)), b"ab") == Ending(FinishReason.CONTEXT_LIMIT)
    assert say(sequence(spec("ab", context=4)), b"ab") == Ending(FinishReason.GRAMMAR_COMPLETE)


def test_without_eos_it_goes_on_for_as_long_as_more_can_follow() -> None:
    one = sequence(spec("ab{0,2}", StopSpec(eos_ids=frozenset({EOS}), ignore_eos=True)))
    assert say(one, b"a") is None and offered(one) == {98}
    assert say(one, b"bb") == Ending(FinishReason.GRAMMAR_COMPLETE)


def test_a_hidden_stop_id_is_like_an_end_token() -> None:
    one = sequence(spec("ab?", StopSpec(token_ids=frozenset({SPECIAL}), eos_ids=frozenset({EOS}))))
    assert SPECIAL not in offered(one)
    assert say(one, [97, SPECIAL]) == Ending(FinishReason.STOP_TOKEN, matched_token_id=SPECIAL)


def test_a_stop_id_with_text_ends_the_output_whole_or_not() -> None:
    one = sequence(spec("abc", StopSpec(token_ids=frozenset({98}), eos_ids=frozenset({EOS}))))
    assert say(one, b"ab") == Ending(FinishReason.STOP_TOKEN, matched_token_id=98)


def test_a_stop_text_ends_the_output_whole_or_not() -> None:
    one = sequence(spec("[a-z]*", StopSpec(StopRules((b"xy",)), eos_ids=frozenset({EOS}))))
    assert say(one, b"abxy") == Ending(FinishReason.STOP_SEQUENCE, matched_stop="xy")


def test_min_output_tokens_hold_the_end_back_while_more_can_follow() -> None:
    one = sequence(spec("a[bc]*", StopSpec(eos_ids=frozenset({EOS}), min_output_tokens=3)))
    assert say(one, b"a") is None and offered(one) == {98, 99}
    assert say(one, b"bc") is None and offered(one) == {98, 99, EOS}


def test_a_complete_grammar_ends_the_output_before_min_output_tokens() -> None:
    one = sequence(spec("ab", StopSpec(eos_ids=frozenset({EOS}), min_output_tokens=9)))
    assert say(one, b"ab") == Ending(FinishReason.GRAMMAR_COMPLETE)


def test_before_min_output_tokens_a_stop_id_is_text_where_nothing_else_can_follow() -> None:
    stop = StopSpec(token_ids=frozenset({98}), eos_ids=frozenset({EOS}), min_output_tokens=3)
    one = sequence(spec("a[bc]b*c", stop))
    assert say(one, b"a") is None and offered(one) == {99}
    one = sequence(spec("abb?b?c", stop))
    assert say(one, b"a") is None and offered(one) == {98}, "only the stop id can follow: it is text for now"
    assert say(one, b"b") is None and offered(one) == {99}
    one = sequence(spec("abbbc", stop))
    assert say(one, b"abb") is None
    assert say(one, b"b") == Ending(FinishReason.STOP_TOKEN, matched_token_id=98)


def test_the_mask_acts_after_the_bias_and_before_penalties() -> None:
    biased = SamplingParams(temperature=0.0, logit_bias=((120, 100.0), (98, 5.0)), presence_penalty=2.0)
    one = sequence(spec("[abc]*", sampling=biased))
    logits = torch.zeros((1, len(ENTRIES)))
    logits[0, 97] = 4.0
    assert SAMPLER.choose(logits, [one.sample_row()]) == [98]
    say(one, b"b")
    assert SAMPLER.choose(logits, [one.sample_row()]) == [97]


def test_a_token_that_the_grammar_does_not_allow_is_a_failure_and_never_text() -> None:
    one = sequence(spec("ab"))
    step = one.choose(120, 0.0)
    assert (step.text, step.ending) == (b"", Ending(FinishReason.MODEL_ERROR, Cause.GRAMMAR_FAILED))


def test_a_place_without_any_token_is_seen() -> None:
    entries = (b"a", b"c", b"")
    small = compiled(regex("ab?c|ab"), Vocabulary(plain_table(entries), 3, frozenset({2})))
    one = Sequence(spec("a", grammar=small, prompt_token_ids=(0,)), partial(Detokeniser, plain_table(entries)))
    assert not one.stuck
    none = compiled(regex("ab"), Vocabulary(plain_table(entries), 3, frozenset({2})))
    one = Sequence(spec("a", grammar=none, prompt_token_ids=(0,)), partial(Detokeniser, plain_table(entries)))
    one.completed(1)
    one.choose(0, 0.0)
    assert one.stuck
    one.drop_grammar()
    assert not one.stuck and one.sample_row().allowed is None


@pytest.mark.parametrize("k", range(1, 6))
def test_an_output_that_goes_on_stands_where_it_stood(k: int) -> None:
    made = spec("[ab]c{2}(de|f)+", StopSpec(StopRules((b"dx",)), eos_ids=frozenset({EOS})))
    tokens = list(b"accdede")
    whole = sequence(made)
    say(whole, tokens[:k])
    again = sequence(replace(made, earlier=Earlier(tuple(tokens[:k]))))
    rest = [sequence_row(one) for one in (whole, again)]
    assert np.array_equal(rest[0], rest[1])
    assert say(again, tokens[k:]) is None and say(whole, tokens[k:]) is None
    assert offered(again) == offered(whole) == {100, 102, EOS}


def sequence_row(one: Sequence) -> np.ndarray:
    mask = one.sample_row().allowed
    assert mask is not None
    return mask.copy()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [(b"ax", "breaks the grammar at 1"), (b"ab", "completes the grammar"), ([97, EOS], "ending id")],
)
def test_tokens_that_can_not_have_been_chosen_are_refused(tokens: bytes | list[int], says: str) -> None:
    with pytest.raises(CanNotGoOn, match=says):
        sequence(spec("ab", earlier=Earlier(tuple(tokens))))


@pytest.mark.parametrize(
    ("pattern", "stop", "tokens"),
    [
        ("ab?c?d?", StopSpec(eos_ids=frozenset({EOS})), b"abc"),
        ("a[bc]*", StopSpec(eos_ids=frozenset({EOS}), min_output_tokens=3), b"abcbc"),
        ("abb?b?c", StopSpec(token_ids=frozenset({98, SPECIAL}), min_output_tokens=3), b"abb"),
        ("(ab|c)*", StopSpec(eos_ids=frozenset({EOS}), ignore_eos=True), [256, 99, 97, 98, 256]),
    ],
)
def test_rows_after_drafts_are_those_of_an_output_that_chose_them(
    pattern: str, stop: StopSpec, tokens: bytes | list[int]
) -> None:
    penalised = SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5)
    made = spec(pattern, stop, most=30, sampling=penalised)
    one, plain = sequence(made), sequence(made)
    first, *drafts = tokens
    for each in (one, plain):
        each.choose(first, 0.0)
    assert one.fit_drafts((*drafts, 120, 97)) == tuple(drafts) and one.draft_room > len(drafts)
    assert one.grammar is not None
    one.grammar.prepare()
    rows = one.sample_rows(tuple(drafts))
    assert len(rows) == len(drafts) + 1
    for row, draft in zip(rows, [*drafts, None], strict=True):
        assert plain.grammar is not None
        plain.completed(1)
        (expected,) = plain.sample_rows(())
        assert row.allowed is not None and (row.allowed == expected.allowed).all()
        assert (row.position, row.banned_ids, row.ending_ids) == (expected.position, expected.banned_ids, expected.ending_ids)
        if draft is not None:
            assert plain.choose(draft, 0.0).ending is None


def test_only_a_row_with_a_mask_is_drawn_from_ahead() -> None:
    one = sequence(spec("abcd*"))
    one.choose(97, 0.0)
    assert one.fit_drafts(tuple(b"bcd")) == tuple(b"bcd")
    assert one.grammar is not None
    one.grammar.prepare()
    one.completed(1)
    one.choose(98, 0.0)
    assert one.drawn_ahead
    one.fit_drafts(tuple(b"cd"))
    one.completed(1)
    one.choose(99, 0.0)
    assert not one.drawn_ahead, "its mask was not filled"
    assert offered(one) == {100, EOS}


def test_an_output_whose_masks_after_drafts_fail_goes_on_without_drafts() -> None:
    one = sequence(spec("ab?c?"))
    assert not one.renew_grammar(), "its own mask is missing"
    one.choose(97, 0.0)
    assert offered(one) == {98, 99, EOS} and one.fit_drafts((98,)) == (98,)
    left = one.grammar
    assert one.draft_room and one.renew_grammar() and one.grammar is not left and not one.draft_room
    assert [row.allowed is None for row in one.sample_rows((98,))] == [False, True]
    one.completed(1)
    one.choose(98, 0.0)
    assert not one.drawn_ahead and offered(one) == {99, EOS}


def test_where_no_token_can_follow_a_draft_nothing_is_drawn_ahead() -> None:
    entries = (b"a", b"c", b"b", b"")
    none = compiled(regex("abd"), Vocabulary(plain_table(entries), 4, frozenset({3})))
    one = Sequence(spec("a", grammar=none, prompt_token_ids=(0,)), partial(Detokeniser, plain_table(entries)))
    one.completed(1)
    one.choose(0, 0.0)
    assert one.fit_drafts((2, 0)) == (2,)
    assert one.grammar is not None
    one.grammar.prepare()
    one.completed(1)
    assert one.choose(2, 0.0).ending is None and not one.drawn_ahead and one.stuck

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

"""A sequence that goes on after the tokens of an earlier attempt is the sequence that was never disturbed."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.sequence import CanNotGoOn, Earlier, Sequence, Step
from lifecycle.finish import Cause, Ending, FinishReason
from tests.unit.sequence_kit import Case, feed, ids_of, run, text_of
from tests.unit.test_sequence_model import CASES, PAIRED
from text.detokeniser import Detokeniser, plain_table

PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
LETTERS = tuple(bytes([value]) for value in range(128))


def resumed(case: Case, earlier: Earlier) -> Sequence:
    """A sequence that goes on after `earlier`, with everything that it is given in the cache."""
    sequence = Sequence(replace(case.spec(), earlier=earlier), partial(Detokeniser, plain_table(case.vocabulary)))
    assert sequence.given_token_ids == case.prompt + earlier.token_ids
    sequence.completed(len(sequence.given_token_ids))
    return sequence


def delivered(steps: list[Step]) -> tuple[int, int]:
    """Bytes of text and count of ids that some steps showed."""
    return len(text_of(steps).encode()), len(ids_of(steps))


def assert_goes_on(case: Case, tokens: list[int], k: int, shown: int) -> None:
    """Resume after k tokens, the text of the first `shown` of which was delivered."""
    whole, steps = run(case, tokens)
    text_bytes, returned = delivered(steps[:shown])
    sequence = resumed(case, Earlier(tuple(tokens[:k]), text_bytes, returned))
    assert sequence.selected_tokens == k and sequence.ending is None
    undisturbed, _ = run(case, tokens[:k])
    if undisturbed.waiting:
        undisturbed.completed(1)
    ours, theirs = sequence.sample_row(), undisturbed.sample_row()
    assert (ours.position, ours.banned_ids, ours.sequence_index) == (theirs.position, theirs.banned_ids, theirs.sequence_index)
    if ours.history is not None and theirs.history is not None:
        assert list(ours.history.ids) == list(theirs.history.ids)
        assert list(ours.history.output_counts) == list(theirs.history.output_counts)
    rest = [feed(sequence, token) for token in tokens[k : len(steps)]]
    if whole.ending is None:
        steps.append(whole.end(CANCEL, 0.0))
        rest.append(sequence.end(CANCEL, 0.0))
    assert text_of(steps[:shown]) + text_of(rest) == text_of(steps)
    assert ids_of(steps[:shown]) + ids_of(rest) == ids_of(steps)
    assert sequence.ending == whole.ending
    assert sequence.output_token_ids == whole.output_token_ids
    # With nothing fed after it the last token of the earlier attempt is in the cache here, and waits there.
    processed = sequence.cache_tokens - (0 < k == whole.selected_tokens)
    assert replace(sequence.usage(), processed_tokens=processed) == whole.usage()
    assert sequence.held_bytes == whole.held_bytes


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=CASES, tokens=PAIRED, penalised=st.booleans(), data=st.data())
def test_any_output_resumed_anywhere_is_the_undisturbed_one(
    case: Case, tokens: list[int], penalised: bool, data: st.DataObject
) -> None:
    case = replace(case, sampling=PENALISED if penalised else case.sampling)
    _, steps = run(case, tokens)
    last = len(steps) - 1 if steps and steps[-1].ending is not None else len(steps)
    k = data.draw(st.integers(0, max(0, last)))
    assert_goes_on(case, tokens, k, data.draw(st.integers(0, k)))


OUTPUTS = [
    Case(LETTERS, stops=("END",)),
    Case(LETTERS, stops=("ENDS", "NDE"), include_stop=True, least=4),
    Case(LETTERS, stops=("EN", "E"), least=9),
    Case(LETTERS, eos_ids=frozenset({ord("D")}), least=6, sampling=PENALISED),
    Case(LETTERS, most=7),
    Case(LETTERS, context=9),
]


@pytest.mark.parametrize("case", OUTPUTS)
def test_every_split_of_a_few_outputs(case: Case) -> None:
    tokens = list(b"aENaENDEENDSx")
    _, steps = run(case, tokens)
    for k in range(len(steps)):
        for shown in range(k + 1):
            assert_goes_on(case, tokens, k, shown)


def test_a_character_that_was_cut_is_completed() -> None:
    case = Case(tuple(bytes([value]) for value in range(256)))
    sequence = resumed(case, Earlier((0xE4, 0xBD)))
    assert feed(sequence, 0xA0).text == "你".encode()
    assert sequence.usage().returned_tokens == 3


def test_what_was_not_delivered_comes_with_the_end_when_there_is_no_token() -> None:
    sequence = resumed(Case(LETTERS, stops=("END",)), Earlier(tuple(b"abEN"), 1, 1))
    last = sequence.end(CANCEL, 0.0)
    assert (last.text, last.token_ids) == (b"bEN", tuple(b"bEN"))
    assert sequence.usage().returned_tokens == 4


def test_text_held_for_a_stop_stays_held_when_the_output_may_go_on_elsewhere() -> None:
    sequence = resumed(Case(LETTERS, stops=("END",)), Earlier(tuple(b"abEN"), 1, 1))
    last = sequence.leave(Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN))
    assert (last.text, last.token_ids) == (b"b", tuple(b"b"))
    assert sequence.held_bytes == 2 and sequence.usage().returned_tokens == 2


@pytest.mark.parametrize(
    ("case", "earlier", "field"),
    [
        (Case(LETTERS, stops=("END",)), Earlier(tuple(b"xENDx")), "token_ids"),
        (Case(LETTERS, eos_ids=frozenset({1})), Earlier((97, 1)), "token_ids"),
        (Case(LETTERS, stop_ids=frozenset({98})), Earlier(tuple(b"ab")), "token_ids"),
        (Case(LETTERS, most=3), Earlier(tuple(b"abc")), "token_ids"),
        (Case(LETTERS, context=5), Earlier(tuple(b"ab")), "token_ids"),
        (Case((b"a", b"\xff")), Earlier((0, 1)), "token_ids"),
        (Case(LETTERS), Earlier(tuple(b"ab"), text_bytes=3), "text_bytes"),
        (Case(LETTERS, stops=("bc",)), Earlier(tuple(b"ab"), text_bytes=2), "text_bytes"),
        (Case((b"a", "é".encode())), Earlier((1,), text_bytes=1), "text_bytes"),
        (Case(LETTERS, stops=("bc",)), Earlier(tuple(b"ab"), returned_tokens=2), "returned_tokens"),
    ],
)
def test_what_can_not_be_gone_on_with_is_an_error_that_names_it(case: Case, earlier: Earlier, field: str) -> None:
    with pytest.raises(CanNotGoOn) as wrong:
        resumed(case, earlier)
    assert wrong.value.field == field


def test_ending_ids_before_the_least_count_of_tokens_are_tokens() -> None:
    case = Case(LETTERS, eos_ids=frozenset({97}), least=2)
    sequence = resumed(case, Earlier(tuple(b"aa"), 2, 2))
    assert feed(sequence, 97).ending == Ending(FinishReason.EOS, matched_token_id=97)

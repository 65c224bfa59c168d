"""The sequence: order within a token, endings, limits, half characters, usage, held text."""

import time

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import OutOfOrder, SequenceSpec, StopSpec
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.states import State
from lifecycle.usage import Usage
from tests.unit.sequence_kit import GREEDY, KEY, Case, feed, ids_of, run, text_of
from text.detokeniser import Utf8Policy

EOS = 0
#: 0 and 1 are special; then letters; then a character in two halves, an invalid byte, a letter with a first half.
VOCABULARY = (b"", b"", b"a", b"b", b"ab", b"\xe4\xbd", b"\xa0", b"\xff", b"a\xe4")
A, B, AB, HALF, REST, INVALID, A_HALF = range(2, 9)

BAD_UTF8 = Ending(FinishReason.MODEL_ERROR, Cause.BAD_UTF8)
CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


def case(**fields: object) -> Case:
    return Case(VOCABULARY, eos_ids=frozenset({EOS}), **fields)  # type: ignore[arg-type]


# Endings --------------------------------------------------------------------------------------------------------------


def test_eos_ends_and_is_not_shown() -> None:
    sequence, steps = run(case(), [A, EOS])
    assert steps[-1].ending == Ending(FinishReason.EOS, matched_token_id=EOS)
    assert (text_of(steps), ids_of(steps)) == ("a", [A])
    assert sequence.usage() == Usage(prompt_tokens=3, selected_tokens=2, processed_tokens=4, returned_tokens=1, billed_tokens=2)


def test_b24_the_first_token_may_be_eos() -> None:
    sequence, steps = run(case(), [EOS])
    assert steps[0].ending == Ending(FinishReason.EOS, matched_token_id=EOS)
    assert sequence.usage().billed_tokens == 1
    assert sequence.usage().processed_tokens == 3


def test_a_stop_id_is_told_from_eos() -> None:
    _, steps = run(case(stop_ids=frozenset({B})), [A, B])
    assert steps[-1].ending == Ending(FinishReason.STOP_TOKEN, matched_token_id=B)
    assert text_of(steps) == "a"
    _, steps = run(case(stop_ids=frozenset({EOS})), [A, EOS])
    assert steps[-1].ending == Ending(FinishReason.EOS, matched_token_id=EOS)


def test_max_output_tokens_is_met_exactly() -> None:
    for most in (1, 2, 5):
        sequence, steps = run(case(most=most), [A] * 9)
        assert steps[-1].ending == Ending(FinishReason.MAX_OUTPUT_TOKENS)
        assert text_of(steps) == "a" * most
        assert sequence.usage().selected_tokens == sequence.usage().returned_tokens == most
        assert sequence.cache_tokens == 3 + most - 1 == sequence.spec.most_cache_tokens


def test_eos_at_the_limit_is_eos() -> None:
    _, steps = run(case(most=2), [A, EOS])
    assert steps[-1].ending is not None and steps[-1].ending.reason is FinishReason.EOS


@pytest.mark.parametrize("length", [1, 5, 9, 10])
def test_the_context_ends_the_output(length: int) -> None:
    sequence, steps = run(case(prompt=(1,) * length, context=10), [A] * 20)
    assert steps[-1].ending == Ending(FinishReason.CONTEXT_LIMIT)
    assert len(steps) == max(1, 10 - length)
    assert sequence.cache_tokens == sequence.spec.most_cache_tokens


def test_a_stop_hit_goes_before_the_limits() -> None:
    _, steps = run(case(most=2, stops=("ab",)), [A, B])
    assert steps[-1].ending == Ending(FinishReason.STOP_SEQUENCE, matched_stop="ab")
    assert text_of(steps) == ""


def test_held_text_is_shown_at_every_end_but_a_stop() -> None:
    for ending in (CANCEL, Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE)):
        sequence, steps = run(case(stops=("abb",)), [B, A, B])
        assert text_of(steps) == "b" and sequence.held_bytes == 2
        last = feed(sequence, B, 0.0, ending)
        assert (last.text, last.token_ids, last.ending) == (b"ab", (A, B), ending)
        assert sequence.held_bytes == 2
        assert ending.state(sequence.usage().returned_tokens) in (State.CANCELLED, State.FINISHED)
    sequence, steps = run(case(stops=("abb",), most=2), [A, B])
    assert text_of(steps) == "ab" and ids_of(steps) == [A, B]
    sequence, steps = run(case(stops=("abb",)), [A, B, EOS])
    assert text_of(steps) == "ab" and ids_of(steps) == [A, B]


def test_nothing_is_chosen_after_a_cancel_was_seen() -> None:
    sequence, _ = run(case(), [A, A])
    step = feed(sequence, EOS, 0.0, CANCEL)
    assert step.ending == CANCEL
    assert sequence.output_token_ids == (A, A)
    assert sequence.usage() == Usage(prompt_tokens=3, selected_tokens=2, processed_tokens=5, returned_tokens=2, billed_tokens=2)


def test_an_ending_may_come_before_any_token() -> None:
    step = case().start().choose(A, 0.0, CANCEL)
    assert (step.text, step.token_ids, step.ending) == (b"", (), CANCEL)


def test_nothing_happens_after_the_end() -> None:
    sequence, _ = run(case(), [A, EOS])
    for call in (
        lambda: sequence.choose(A, 0.0),
        lambda: sequence.choose(A, 0.0, CANCEL),
        lambda: sequence.end(CANCEL, 0.0),
        sequence.next_input,
    ):
        with pytest.raises(OutOfOrder):
            call()
    assert sequence.ending == Ending(FinishReason.EOS, matched_token_id=EOS)


# Minimum and ignore_eos -----------------------------------------------------------------------------------------------


def test_b30_end_ids_are_masked_until_the_minimum_of_generated_tokens() -> None:
    sequence = case(least=2, stop_ids=frozenset({B})).start()
    for token in (A, A):
        assert sequence.banned_ids() == sequence.sample_row().banned_ids == (EOS, B)
        feed(sequence, token)
    assert sequence.banned_ids() == ()
    assert feed(sequence, EOS).ending == Ending(FinishReason.EOS, matched_token_id=EOS)


def test_b30_ignore_eos_masks_only_the_requests_own_ids_and_ends_with_none_of_the_models() -> None:
    extra = case(least=1, ignore_eos=True, stop_ids=frozenset({B}))
    sequence = Case(**{**extra.__dict__, "eos_ids": frozenset({EOS, 1})}).start()
    assert sequence.banned_ids() == (B,)
    assert [feed(sequence, token).ending for token in (EOS, 1, A)] == [None, None, None]
    assert feed(sequence, B).ending == Ending(FinishReason.STOP_TOKEN, matched_token_id=B)


def test_c5_an_end_id_before_the_minimum_neither_stops_nor_vanishes() -> None:
    _, steps = run(case(least=5, stop_ids=frozenset({A})), [A, EOS, B])
    assert text_of(steps) == "ab" and ids_of(steps) == [A, EOS, B]


def test_c5_the_minimum_counts_tokens_before_an_end_id_and_with_a_stop_text() -> None:
    """An end id that is token number `least` comes too early; a stop text that it completes does not."""
    for ending in (EOS, B):
        _, steps = run(case(least=2, stop_ids=frozenset({B})), [A, ending, ending])
        assert [step.ending is None for step in steps] == [True, True, False]
    _, steps = run(case(least=2, stops=("ab",)), [A, B])
    assert steps[-1].ending is not None


def test_c5_a_stop_before_the_minimum_is_text() -> None:
    _, steps = run(case(least=3, stops=("ab",)), [A, B, B, AB])
    assert text_of(steps) == "abb"
    assert steps[-1].ending == Ending(FinishReason.STOP_SEQUENCE, matched_stop="ab")


# Half characters ------------------------------------------------------------------------------------------------------


def test_b29_half_a_character_waits() -> None:
    _, steps = run(case(), [A_HALF, REST, REST])
    assert [(step.text, step.token_ids) for step in steps] == [
        (b"a", ()),
        (b"", ()),
        (b"\xe4\xa0\xa0", (A_HALF, REST, REST)),
    ]
    _, steps = run(case(), [A, HALF, REST, B])
    assert [(step.text.decode(), step.token_ids) for step in steps] == [
        ("a", (A,)),
        ("", ()),
        ("你", (HALF, REST)),
        ("b", (B,)),
    ]


CUTS = [
    (None, FinishReason.MAX_OUTPUT_TOKENS, Ending(FinishReason.MAX_OUTPUT_TOKENS)),
    (None, FinishReason.CONTEXT_LIMIT, Ending(FinishReason.CONTEXT_LIMIT)),
    (None, FinishReason.CANCELLED, CANCEL),
    (None, FinishReason.EOS, BAD_UTF8),
    (None, FinishReason.STOP_TOKEN, BAD_UTF8),
    (Utf8Policy.DROP, FinishReason.EOS, Ending(FinishReason.EOS, matched_token_id=EOS)),
    (Utf8Policy.DROP, FinishReason.MAX_OUTPUT_TOKENS, Ending(FinishReason.MAX_OUTPUT_TOKENS)),
    (Utf8Policy.ERROR, FinishReason.MAX_OUTPUT_TOKENS, BAD_UTF8),
    (Utf8Policy.ERROR, FinishReason.CONTEXT_LIMIT, BAD_UTF8),
    (Utf8Policy.ERROR, FinishReason.CANCELLED, CANCEL),
]


@pytest.mark.parametrize(("policy", "how", "expected"), CUTS)
def test_c6_output_that_ends_inside_a_character(policy: Utf8Policy | None, how: FinishReason, expected: Ending) -> None:
    """A stop text that could still come holds back "a", which is shown whatever becomes of the half character."""
    limits: dict[FinishReason, dict[str, object]] = {
        FinishReason.MAX_OUTPUT_TOKENS: {"most": 2},
        FinishReason.CONTEXT_LIMIT: {"context": 5},
    }
    sequence = case(policy=policy, stops=("ab",), stop_ids=frozenset({B}), **limits.get(how, {})).start()
    steps = [feed(sequence, A), feed(sequence, HALF)]
    if steps[-1].ending is None:
        last = {FinishReason.EOS: EOS, FinishReason.STOP_TOKEN: B}.get(how, A)
        steps.append(feed(sequence, last, 0.0, CANCEL if how is FinishReason.CANCELLED else None))
    assert steps[-1].ending == expected == sequence.ending
    assert (text_of(steps), ids_of(steps)) == ("a", [A])
    assert expected.state(1) is (State.FAILED if expected == BAD_UTF8 else expected.state(1))


def test_after_a_stop_hit_half_a_character_is_dropped_without_an_error() -> None:
    vocabulary = (b"", b"END\xe4")
    _, steps = run(Case(vocabulary, stops=("END",), policy=Utf8Policy.ERROR), [1])
    assert steps[-1].ending == Ending(FinishReason.STOP_SEQUENCE, matched_stop="END")
    assert text_of(steps) == ""


def test_bytes_that_can_never_become_text_fail_the_sequence_with_its_text_kept() -> None:
    for policy in (None, Utf8Policy.ERROR):
        sequence, steps = run(case(policy=policy, stops=("ab",)), [B, A, INVALID, B])
        assert steps[-1].ending == BAD_UTF8 and len(steps) == 3
        assert (text_of(steps), ids_of(steps)) == ("ba", [B, A])
        assert BAD_UTF8.state(sequence.usage().returned_tokens) is State.FAILED


def test_bytes_left_out_by_the_drop_policy_leave_their_tokens_in_the_output() -> None:
    _, steps = run(case(policy=Utf8Policy.DROP), [B, INVALID, HALF, B, HALF, INVALID, A])
    assert text_of(steps) == "bba"
    assert [step.token_ids for step in steps] == [(B,), (INVALID,), (), (HALF, B), (), (HALF, INVALID), (A,)]


# Which tokens are shown -----------------------------------------------------------------------------------------------


def test_held_tokens_appear_with_their_last_byte_and_cut_ones_never() -> None:
    _, steps = run(case(stops=("abb",)), [AB, A, B, B])
    assert [(step.text, step.token_ids) for step in steps] == [(b"", ()), (b"ab", (AB,)), (b"", ()), (b"", ())]


def test_b28_include_stop_shows_the_stop_and_the_tokens_that_end_in_it() -> None:
    _, steps = run(case(stops=("ba",), include_stop=True), [A, B, AB])
    assert (text_of(steps), ids_of(steps)) == ("aba", [A, B])
    _, steps = run(case(stops=("ba",), include_stop=True), [A, B, A])
    assert (text_of(steps), ids_of(steps)) == ("aba", [A, B, A])


def test_b28_streamed_text_of_a_long_stop_over_many_tokens() -> None:
    alphabet = tuple(bytes([letter]) for letter in b"ABCDEFGHIJKLMNOP")
    sequence, steps = run(Case(alphabet, stops=("DEFGHIJ",)), range(16))
    assert text_of(steps) == "ABC" and len(steps) == 10
    assert sequence.usage() == Usage(prompt_tokens=3, selected_tokens=10, processed_tokens=12, returned_tokens=3, billed_tokens=3)
    assert sequence.held_bytes == 7


def test_an_id_without_text_is_shown_when_everything_before_it_is() -> None:
    _, steps = run(case(ignore_eos=True, stops=("ab",)), [B, EOS, A, EOS, A])
    assert [(step.text, step.token_ids) for step in steps] == [
        (b"b", (B,)),
        (b"", (EOS,)),
        (b"", ()),
        (b"", ()),
        (b"a", (A, EOS)),
    ]


# Counts and clocks ----------------------------------------------------------------------------------------------------


def test_the_longest_hold_is_that_of_text_shown_in_the_end() -> None:
    sequence = case(stops=("abb",)).start()
    feed(sequence, A, 10.0)
    feed(sequence, B, 11.0)
    assert sequence.stop_hold_s == 0.0
    feed(sequence, A, 12.5)  # releases "ab": "a" waited 2.5 s
    assert sequence.stop_hold_s == 2.5
    feed(sequence, B, 20.0)
    feed(sequence, B, 99.0)  # a stop: what it took away was not delayed, it is gone
    assert sequence.stop_hold_s == 2.5
    assert sequence.last_selected_at == 99.0


def test_a_hold_that_ends_with_the_output_counts() -> None:
    sequence = case(stops=("abb",)).start()
    feed(sequence, B, 9.0)
    feed(sequence, A, 10.0)
    assert sequence.end(CANCEL, 13.0).text == b"a"
    assert sequence.stop_hold_s == 3.0


def test_b32_cached_prompt_tokens_are_the_callers_to_know() -> None:
    sequence, _ = run(case(), [A])
    assert sequence.usage(2).cached_prompt_tokens == 2
    assert sequence.usage().cached_prompt_tokens == 0


def test_the_samplers_row_names_position_and_tokens_so_far() -> None:
    sequence = case(sampling=SamplingParams(frequency_penalty=1.0, seed=4), prompt=(5, 5, 2)).start()
    for token in (A, B, A):
        feed(sequence, token)
    row = sequence.sample_row()
    assert (row.position, row.sequence_index, row.params.seed) == (3, 0, 4)
    assert row.history is not None
    assert dict(zip(row.history.ids.tolist(), row.history.output_counts.tolist(), strict=True)) == {2: 2, 3: 1, 5: 0}
    assert case().start().sample_row().history is None


# Order ----------------------------------------------------------------------------------------------------------------


def test_the_prompt_must_be_in_the_cache_before_the_first_choice() -> None:
    sequence = case().start()
    fresh = type(sequence)(sequence.spec, lambda policy: _never())
    with pytest.raises(OutOfOrder, match="0 tokens are in the cache, 3 must be"):
        fresh.choose(A, 0.0)
    fresh.completed(2)
    with pytest.raises(OutOfOrder):
        fresh.choose(A, 0.0)
    with pytest.raises(OutOfOrder, match="at most 1"):
        fresh.completed(2)
    fresh.completed(1)
    with pytest.raises(OutOfOrder):
        fresh.completed(1)


def _never() -> object:
    return None


def test_a_token_is_fed_before_the_next_is_chosen() -> None:
    sequence = case().start()
    with pytest.raises(OutOfOrder, match="no token waits"):
        sequence.next_input()
    sequence.choose(A, 0.0)
    assert sequence.waiting and sequence.next_input() == (A, 3)
    with pytest.raises(OutOfOrder):
        sequence.choose(A, 0.0)
    with pytest.raises(OutOfOrder):
        sequence.completed(2)
    sequence.completed(1)
    assert not sequence.waiting
    with pytest.raises(OutOfOrder):
        sequence.completed(1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"prompt_token_ids": ()}, "prompt_token_ids has 0 ids"),
        ({"context_tokens": 2}, "prompt_token_ids has 3 ids, must have 1 to context_tokens, which is 2"),
        ({"index": -1}, "index is -1"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, object], named: str) -> None:
    whole: dict[str, object] = {
        "key": KEY,
        "index": 0,
        "prompt_token_ids": (1, 2, 3),
        "sampling": GREEDY,
        "stop": StopSpec(),
        "max_output_tokens": 5,
        "context_tokens": 10,
    }
    with pytest.raises(ValueError, match=named):
        SequenceSpec(**{**whole, **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_output_tokens is -1"):
        StopSpec(min_output_tokens=-1)


@pytest.mark.slow
def test_c3_a_token_costs_the_same_at_any_length() -> None:
    sequence = case(most=10**6, context=10**6, stops=("abba",), sampling=SamplingParams(presence_penalty=1.0)).start()

    def thousand() -> float:
        start = time.perf_counter()
        for token in (A, B, HALF, REST) * 250:
            feed_fast(token)
        return time.perf_counter() - start

    def feed_fast(token: int) -> None:
        if sequence.waiting:
            sequence.completed(1)
        sequence.choose(token, 0.0)
        sequence.sample_row()

    early = min(thousand() for _ in range(5))
    for _ in range(20):
        thousand()
    late = min(thousand() for _ in range(5))
    assert late < 3 * early + 0.01

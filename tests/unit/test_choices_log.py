"""The log of several outputs: one row of numbers, an end for each, the likeliest first where fewer are told."""

import random

import pytest

from decode_svc.choices_log import ChoicesLog, ChoicesTold
from decode_svc.messages import SeatEnded, SeatReport
from decode_svc.stream_log import PromptPart, Published
from engine.log_probs import TokenLogProb
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.usage import Usage, together

END = Ending(FinishReason.MAX_OUTPUT_TOKENS)
CANCELLED = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
ELSEWHERE = Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)


def ended(choice: int, ending: Ending = END, tokens: int = 1) -> SeatEnded:
    usage = Usage(prompt_tokens=5, selected_tokens=tokens, returned_tokens=tokens, billed_tokens=tokens)
    return SeatEnded(choice, ending, usage, SeatReport.unknown(0.0, 1.0))


def log_of(count: int, **told: object) -> ChoicesLog:
    return ChoicesLog(1, 10_000, dict.fromkeys(range(count), ()), ChoicesTold(**told))  # type: ignore[arg-type]


def published(log: ChoicesLog) -> list[Published]:
    found = []
    while (one := log.publish()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_numbers_rise_by_one_and_each_output_is_whole(seed: int) -> None:
    rng = random.Random(seed)
    log, said, told = log_of(3), dict.fromkeys(range(3), b""), dict.fromkeys(range(3), "")
    live, events = [0, 1, 2], list[Published]()
    while live:
        choice = rng.choice(live)
        text = rng.choice((b"", b"a", b"bc"))
        log.add_to(choice, text, [len(said[choice])], [len(said[choice])], 0.0)
        said[choice] += text
        if rng.random() < 0.1:
            live.remove(choice)
            log.end_choice(choice, ended(choice))
        if rng.random() < 0.5:
            events += published(log)
    log.end(ended(0))
    events += published(log)
    assert [one.sequence_no for one in events] == list(range(1, len(events) + 1))
    for one in events:
        told[one.choice] += one.text
    assert told == {choice: text.decode() for choice, text in said.items()}
    assert sorted(one.choice for one in events if one.ended is not None) == [0, 1, 2]
    for choice in range(3):
        assert [one for one in events if one.choice == choice][-1].ended is not None
    assert log.terminal() is not None and log.terminal() is None


def test_one_that_says_much_does_not_keep_others_from_their_turn() -> None:
    log, order = log_of(2), list[int]()
    for _ in range(3):
        for choice in (0, 0, 1):
            log.add_to(choice, b"x", [1], [1], 0.0)
        order += [one.choice for one in published(log)]
    assert order == [0, 1] * 3


def test_what_goes_on_elsewhere_has_no_end_here() -> None:
    """Its text so far is told; what has ended is told as it is, and the request goes on elsewhere."""
    log = log_of(2)
    for choice in range(2):
        log.add_to(choice, b"x", [1], [1], 0.0)
    log.end_choice(0, ended(0))
    log.end_choice(1, ended(1, ELSEWHERE))
    log.end(ended(0, ELSEWHERE))
    events = published(log)
    assert {(one.choice, one.text, one.ended is not None) for one in events} == {(0, "x", True), (1, "x", False)}
    assert log.terminal() is not None


def test_the_prompt_comes_before_an_end_unless_all_end_without_it() -> None:
    log = log_of(2, after_prompt=True)
    log.end_choice(0, ended(0, CANCELLED))
    assert log.publish() is None and not log.ready
    log.add_prompt(PromptPart((1, 2)))
    assert [(one.prompt is not None, one.ended is not None) for one in published(log)] == [(True, False), (False, True)]
    log = log_of(2, after_prompt=True)
    for choice in range(2):
        log.end_choice(choice, ended(choice, CANCELLED))
    assert [one.ended is not None for one in published(log)] == [True, True]


def ranked(values: dict[int, list[float]], endings: dict[int, Ending], most: int) -> list[Published]:
    log = log_of(len(values), final_only=True, top=0, most=most)
    for choice, known in values.items():
        for value in known:
            log.add_to(choice, b"x", [1], [1], 0.0, [TokenLogProb(value, (), ())])
    for choice in sorted(values, reverse=True):
        assert published(log) == []
        log.end_choice(choice, ended(choice, endings.get(choice, END), len(values[choice])))
    return published(log)


@pytest.mark.parametrize(
    ("values", "endings", "best"),
    [
        ({0: [-1.0, -1.0], 1: [-0.5], 2: [-2.0]}, {}, [1, 0]),
        ({0: [-1.0], 1: [-0.5, -1.5], 2: [-1.0]}, {}, [0, 1]),
        ({0: [-0.1], 1: [-0.5], 2: [-2.0]}, {0: CANCELLED}, [1, 2]),
        ({0: [], 1: [-0.5], 2: [-9.0]}, {}, [1, 2]),
        ({0: [-0.1], 1: [-0.5], 2: [-2.0]}, dict.fromkeys(range(3), CANCELLED), [0, 1]),
    ],
)
def test_the_likeliest_are_told_when_all_have_ended(
    values: dict[int, list[float]], endings: dict[int, Ending], best: list[int]
) -> None:
    events = ranked(values, endings, 2)
    assert [one.choice for one in events if one.sequence_no is not None] == best
    assert [one.sequence_no for one in events] == [1, 2, None]
    last = events[-1]
    assert (last.text, last.token_ids, last.log_probs) == ("", (), ()) and last.ended is not None
    assert (last.ended.usage.returned_tokens, last.ended.usage.billed_tokens) == (0, 0)
    assert last.ended.usage.selected_tokens == len(values[last.choice])


def test_with_one_that_goes_on_elsewhere_no_likeliest_is_told() -> None:
    log = log_of(2, final_only=True, top=0, most=1)
    for choice, ending in ((0, END), (1, ELSEWHERE)):
        log.add_to(choice, b"x", [1], [1], 0.0, [TokenLogProb(-1.0, (), ())])
        log.end_choice(choice, ended(choice, ending))
    log.end(ended(0, ELSEWHERE))
    assert published(log) == [] and log.terminal() is not None


def test_counts_of_all_have_the_prompt_once() -> None:
    usages = [Usage(5, 4, 3, 7, 3, 3), Usage(5, 4, 2, 6, 1, 2), Usage(5, 0, 0, 0, 0, 0)]
    assert together(usages) == Usage(5, 4, 5, 8, 4, 5)

"""How fast a queue moves: what is known of it, and when nothing is."""

import math

from router.pace import LEAST_S, LEAST_TAKEN, WINDOW_S, Pace


def moving(seconds: int, tokens: int = 100) -> Pace:
    """A queue that has stood for so many seconds and lost as many tokens in each."""
    pace = Pace()
    pace.stands(0.0)
    for second in range(1, seconds + 1):
        pace.took(tokens, float(second))
    return pace


def test_nothing_is_known_of_a_queue_that_has_not_stood_for_long_or_lost_few() -> None:
    assert Pace().wait_s(1000, 100.0) is None
    assert moving(LEAST_TAKEN - 1).tokens_per_s(60.0 - WINDOW_S) is None
    fast = Pace()
    fast.stands(0.0)
    for _ in range(LEAST_TAKEN):
        fast.took(100, 1.0)
    assert fast.tokens_per_s(LEAST_S - 0.1) is None and fast.tokens_per_s(LEAST_S) == 100 * LEAST_TAKEN / LEAST_S


def test_what_was_taken_lately_counts() -> None:
    pace = moving(60)
    assert pace.tokens_per_s(60.0) == 100.0 and pace.wait_s(1500, 60.0) == 15.0
    for second in range(61, 91):
        pace.took(400, float(second))
    assert pace.tokens_per_s(90.0) == 400.0
    assert pace.tokens_per_s(200.0) is None  # nothing left for so long says nothing of the next minute


def test_one_that_comes_back_was_not_taken() -> None:
    pace = moving(30)
    for second in range(10):
        pace.took(400, 30.0 + second / 10)
        pace.took(-400, 30.0 + second / 10)
    assert pace.tokens_per_s(30.9) is not None and pace.tokens_per_s(30.9) < 101
    back = moving(10)
    back.took(-1000, 10.0)
    assert back.wait_s(1, 10.0) == math.inf


def test_an_empty_queue_begins_anew() -> None:
    pace = moving(30)
    pace.empty()
    pace.took(100, 31.0)
    assert pace.tokens_per_s(31.0) is None
    pace.stands(40.0)
    pace.stands(44.0)  # it stands already
    for _ in range(LEAST_TAKEN):
        pace.took(10, 44.0)
    assert pace.tokens_per_s(48.0) == 10 * LEAST_TAKEN / 8


def test_a_queue_that_stands_for_hours_keeps_only_what_counts() -> None:
    pace = moving(7200)  # nobody asks meanwhile: no request has a queue clock
    assert len(pace._taken) <= WINDOW_S
    assert pace.tokens_per_s(7200.0) == 100.0

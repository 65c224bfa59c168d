"""How fast a queue moves: what is known of it, and when nothing is."""

import math

from router.pace import FORGOTTEN_S, LEAST_READY, LEAST_S, WINDOW_S, Pace


def moving(seconds: int, tokens: int = 100) -> Pace:
    """A queue that has stood for so many seconds, in each of which as many tokens got ready."""
    pace = Pace()
    pace.stands(0.0)
    for second in range(1, seconds + 1):
        pace.ready(tokens, float(second))
    return pace


def test_nothing_is_known_of_a_queue_that_has_not_stood_for_long_or_lost_few() -> None:
    assert Pace().wait_s(1000, 100.0) is None
    assert moving(LEAST_READY - 1).tokens_per_s(60.0 - WINDOW_S) is None
    fast = Pace()
    fast.stands(0.0)
    for _ in range(LEAST_READY):
        fast.ready(100, 1.0)
    assert fast.tokens_per_s(LEAST_S - 0.1) is None and fast.tokens_per_s(LEAST_S) == 100 * LEAST_READY / LEAST_S


def test_what_got_ready_lately_counts() -> None:
    pace = moving(60)
    assert pace.tokens_per_s(60.0) == 100.0 and pace.wait_s(1500, 60.0) == 15.0
    for second in range(61, 91):
        pace.ready(400, float(second))
    assert pace.tokens_per_s(90.0) == 400.0
    assert pace.tokens_per_s(200.0) is None  # nothing ready for so long says nothing of the next minute


def test_prompts_without_tokens_to_compute_move_nothing() -> None:
    assert moving(30, tokens=0).wait_s(1, 30.0) == math.inf


def test_moments_in_which_nobody_waits_do_not_count_and_what_was_known_stays() -> None:
    pace = moving(20)
    pace.empty(20.0)
    pace.ready(9000, 21.0)  # how fast an idle cell is asked says nothing
    assert pace.tokens_per_s(25.0) is None
    pace.stands(30.0)
    pace.stands(31.0)  # it stands already
    assert pace.tokens_per_s(30.0) == 100.0 and pace.wait_s(1000, 30.0) == 10.0
    for second in range(31, 41):
        pace.ready(400, float(second))
    assert pace.tokens_per_s(40.0) == (20 * 100 + 10 * 400) / 30


def test_after_a_longer_pause_a_queue_begins_anew() -> None:
    pace = moving(30)
    pace.empty(30.0)
    pace.stands(30.0 + FORGOTTEN_S + 1)
    assert pace.tokens_per_s(30.0 + FORGOTTEN_S + 1) is None
    for _ in range(LEAST_READY):
        pace.ready(10, 64.0)
    assert pace.tokens_per_s(69.0) == 10 * LEAST_READY / 8


def test_a_queue_that_stands_for_hours_keeps_only_what_counts() -> None:
    pace = moving(7200)  # nobody asks meanwhile: no request has a queue clock
    assert len(pace._ready) <= WINDOW_S
    assert pace.tokens_per_s(7200.0) == 100.0

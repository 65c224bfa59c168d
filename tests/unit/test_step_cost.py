"""What a row more costs, learned from steps."""

import random

import pytest

from decode_svc.step_cost import ROWS_OF_A_STEP, StepCost


def test_a_line_is_found_through_noise() -> None:
    cost, rng = StepCost(), random.Random(1)
    for _ in range(200):
        rows = rng.choice((1, 2, 9, 17, 33))
        cost.add(rows, (0.030 + 0.001 * rows) * rng.uniform(0.9, 1.1))
    assert cost.row_share(1) == pytest.approx(0.001 / 0.031, rel=0.3)
    assert cost.row_share(32) == pytest.approx(0.001 / 0.062, rel=0.3)


def test_before_steps_differ_it_is_a_guess() -> None:
    cost = StepCost()
    assert cost.row_share(4) == 1 / (ROWS_OF_A_STEP + 4)
    for _ in range(100):
        cost.add(4, 0.050)
    assert cost.row_share(4) == pytest.approx(1 / (ROWS_OF_A_STEP + 4))


def test_it_follows_when_steps_change() -> None:
    cost = StepCost()
    for row_s in (0.000, 0.004):
        for rows in (1, 9) * 150:
            cost.add(rows, 0.020 + row_s * rows)
    assert cost.row_share(1) == pytest.approx(0.004 / 0.024, rel=0.2)


def test_a_step_that_was_held_up_counts_little_and_shares_stay_in_range() -> None:
    cost = StepCost()
    for rows in (1, 9) * 50:
        cost.add(rows, 0.020 + 0.001 * rows)
    before = cost.row_share(1)
    cost.add(9, 60.0)
    assert before < cost.row_share(1) < 6 * before
    for rows in (1, 9) * 50:
        cost.add(rows, 0.0)
    for rows in (1, 30, 400):
        assert 0.0 <= cost.row_share(rows) <= 1 / rows
    falling = StepCost()
    for rows in (1, 9) * 50:
        falling.add(rows, 0.020 - 0.002 * rows)
    assert falling.row_share(1) == 0.0

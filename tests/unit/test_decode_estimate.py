"""How much output is expected: a quantile of what ended before, with a margin, within the request's own limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.estimate import SAMPLES_MIN, WINDOW, Estimate


def test_everything_is_expected_until_enough_have_ended() -> None:
    estimate = Estimate(0.8, 0.0)
    for _ in range(SAMPLES_MIN - 1):
        estimate.add(3)
    assert estimate.output_tokens is None and estimate.total(0, 500) == 500
    estimate.add(3)
    assert estimate.output_tokens == 3 and estimate.total(0, 500) == 3 and estimate.total(0, 2) == 2


@pytest.mark.parametrize(("quantile", "margin", "expected"), [(0.5, 0.0, 50), (0.8, 0.0, 80), (1.0, 0.0, 100), (0.8, 0.1, 88)])
def test_quantile_and_margin(quantile: float, margin: float, expected: int) -> None:
    estimate = Estimate(quantile, margin)
    for length in range(100, 0, -1):
        estimate.add(length)
    assert estimate.output_tokens == expected


def test_old_outputs_are_forgotten() -> None:
    estimate = Estimate(1.0, 0.0)
    for length in [1000] * WINDOW + [5] * WINDOW:
        estimate.add(length)
    assert estimate.output_tokens == 5


def test_what_got_longer_than_expected_goes_on_for_a_share_of_it() -> None:
    estimate = Estimate(1.0, 0.0)
    for _ in range(SAMPLES_MIN):
        estimate.add(10)
    assert [estimate.total(chosen, 500) for chosen in (0, 9, 10, 100)] == [10, 10, 13, 125]
    assert estimate.total(499, 500) == 500


@given(st.lists(st.integers(1, 50), min_size=SAMPLES_MIN, max_size=3 * WINDOW), st.floats(0.01, 1.0))
def test_it_is_the_quantile_of_the_last_ones(lengths: list[int], quantile: float) -> None:
    estimate = Estimate(quantile, 0.0)
    for length in lengths:
        estimate.add(length)
    last = lengths[-WINDOW:]
    expected = estimate.output_tokens
    assert expected is not None
    assert sum(length <= expected for length in last) >= quantile * len(last) - 1e-6
    assert sum(length < expected for length in last) < quantile * len(last) + 1e-6


@pytest.mark.parametrize(("quantile", "margin"), [(0.0, 0.1), (1.1, 0.1), (0.5, -0.1)])
def test_limits(quantile: float, margin: float) -> None:
    with pytest.raises(ValueError, match="quantile is"):
        Estimate(quantile, margin)

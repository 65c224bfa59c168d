"""The HPA as its documentation describes it: proportions, tolerance, several metrics, what is missing, windows, rates, bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scaling.hpa import (
    Autoscaler,
    Behaviour,
    Bounds,
    Kind,
    PodReadings,
    Policy,
    Reading,
    Rules,
    Select,
    Unit,
    proposed,
)

WIDE = Bounds(1, 1000)
FREE = Behaviour(Rules((Policy(Unit.PERCENT, 10_000, 15),), 0), Rules((Policy(Unit.PERCENT, 100, 15),), 0))


def total(value: float | None, target: float = 10.0, name: str = "m") -> Reading:
    return Reading(name, value, target)


def decided(current: int, *readings: Reading | PodReadings, bounds: Bounds = WIDE) -> int:
    return Autoscaler(bounds, FREE).decide(0.0, current, readings).replicas


@pytest.mark.parametrize(
    ("current", "value", "target", "expected"),
    [
        (1, 200, 100, 2),  # twice the target doubles
        (2, 50, 100, 1),  # half of it halves
        (4, 109, 100, 4),  # inside the tolerance of a tenth
        (4, 91, 100, 4),
        (10, 112, 100, 12),  # ceil(11.2)
    ],
)
def test_a_value_is_held_against_its_target_in_proportion(current: int, value: float, target: float, expected: int) -> None:
    assert decided(current, Reading("m", value, target, Kind.VALUE)) == expected


def test_a_total_is_shared_by_the_replicas() -> None:
    assert decided(2, total(45)) == 5
    assert decided(5, total(54)) == 5  # 1.08 of the target: near enough
    assert decided(5, total(56)) == 6
    assert decided(5, total(0)) == 1  # the floor holds
    assert proposed(total(30), 0, 0, FREE) == 3  # from nothing


@given(st.integers(2, 200), st.floats(0, 5000), st.floats(1, 50))
def test_one_is_taken_away_only_when_the_others_can_carry_the_load(current: int, load: float, target: float) -> None:
    replicas = decided(current, total(load, target))
    if replicas < current:
        assert load / current * current / replicas <= target * (1 + 1e-9)
    if load * current / (current - 1) > target * current * (1 + 1e-9):
        assert replicas >= current


def test_the_greatest_of_several_counts() -> None:
    assert decided(3, total(50), total(20), total(10)) == 5
    assert decided(3, total(10), total(20)) == 2


def test_a_missing_metric_lets_a_pool_grow_and_never_shrink() -> None:
    assert decided(3, total(10), total(None)) == 3
    assert decided(3, total(80), total(None)) == 8
    assert decided(3, total(None), total(None)) == 3
    decision = Autoscaler(WIDE, FREE).decide(0.0, 3, [total(10), total(None, name="kv")])
    assert (decision.wanted, decision.failed) == (None, ("kv",))


def test_bounds_hold_whatever_the_metrics_say() -> None:
    bounds = Bounds(2, 6)
    assert decided(4, total(0), bounds=bounds) == 2
    assert decided(4, total(1000), bounds=bounds) == 6
    assert decided(9, total(None), bounds=bounds) == 6
    assert decided(1, total(None), bounds=bounds) == 2
    assert decided(0, total(1000), bounds=bounds) == 0  # somebody switched it off


def test_shrinking_follows_the_most_that_was_wanted_in_the_window() -> None:
    scaler = Autoscaler(WIDE, Behaviour(FREE.up, Rules((Policy(Unit.PERCENT, 100, 15),), 300)))
    assert scaler.decide(0, 8, [total(80)]).replicas == 8
    assert scaler.decide(15, 8, [total(20)]).replicas == 8
    assert scaler.decide(285, 8, [total(50)]).replicas == 8
    assert scaler.decide(301, 8, [total(20)]).replicas == 5  # what was wanted at 285
    assert scaler.decide(590, 5, [total(20)]).replicas == 2


def test_growing_can_wait_for_a_window_too() -> None:
    scaler = Autoscaler(WIDE, Behaviour(Rules(FREE.up.policies, 60), FREE.down))
    assert scaler.decide(0, 2, [total(20)]).replicas == 2
    assert scaler.decide(15, 2, [total(90)]).replicas == 2
    assert scaler.decide(61, 2, [total(60)]).replicas == 6


def test_the_documented_policies_down() -> None:
    """From 80 to 10, by a tenth or by 4 pods a minute, whichever is more: a tenth of 72 is 7.2, so 8; from 40 on it is 4."""
    rules = Rules((Policy(Unit.PODS, 4, 60), Policy(Unit.PERCENT, 10, 60)), 0)
    scaler = Autoscaler(WIDE, Behaviour(FREE.up, rules))
    sizes = [80]
    for minute in range(14):
        sizes.append(scaler.decide(minute * 60.0, sizes[-1], [total(100)]).replicas)
    assert sizes == [80, 72, 64, 57, 51, 45, 40, 36, 32, 28, 24, 20, 16, 12, 10]


def test_policies_count_what_was_changed_in_their_period() -> None:
    up = Rules((Policy(Unit.PODS, 4, 60),), 0)
    scaler = Autoscaler(WIDE, Behaviour(up, FREE.down))
    assert scaler.decide(0, 2, [total(1000)]).replicas == 6
    assert scaler.decide(15, 6, [total(1000)]).replicas == 6
    assert scaler.decide(61, 6, [total(1000)]).replicas == 10


def test_defaults_double_or_add_four_in_fifteen_seconds() -> None:
    scaler = Autoscaler(WIDE)
    assert scaler.decide(0, 1, [total(1000)]).replicas == 5
    assert scaler.decide(16, 5, [total(1000)]).replicas == 10
    assert scaler.decide(32, 10, [total(1000)]).replicas == 20


@pytest.mark.parametrize(("select", "expected"), [(Select.MAX, 4), (Select.MIN, 9), (Select.DISABLED, 10)])
def test_policies_are_selected(select: Select, expected: int) -> None:
    down = Rules((Policy(Unit.PODS, 1, 60), Policy(Unit.PERCENT, 60, 60)), 0, select)
    assert Autoscaler(WIDE, Behaviour(FREE.up, down)).decide(0, 10, [total(0)]).replicas == expected


def test_tolerance_is_a_rule_of_each_direction() -> None:
    calm = Behaviour(Rules(FREE.up.policies, 0, tolerance=0.5), Rules(FREE.down.policies, 0, tolerance=0.0))
    assert Autoscaler(WIDE, calm).decide(0, 10, [total(145)]).replicas == 10
    assert Autoscaler(WIDE, calm).decide(0, 10, [total(89)]).replicas == 9


def pods(*values: float, **more: tuple[str, ...]) -> PodReadings:
    return PodReadings("m", {f"p{number}": value for number, value in enumerate(values)}, 10.0, **more)


def test_pods_without_a_number_are_filled_in_against_the_direction() -> None:
    assert decided(3, pods(20, 20, 20)) == 6
    assert decided(3, pods(20, 20, missing=("p2",))) == 4  # 40 / 3 pods: grows less than 6
    assert decided(3, pods(2, 2, missing=("p2",))) == 2  # (2 + 2 + 10) / 3: shrinks less than to 1
    assert decided(3, pods(9.5, 9.5, missing=("p2",))) == 3
    assert decided(2, pods(missing=("p0", "p1"))) == 2  # nobody tells: holds


def test_unready_pods_hold_a_growing_pool_back_and_do_not_shrink_it() -> None:
    assert decided(4, pods(20, 20, unready=("p2", "p3"))) == 4  # the two that start will take their share
    assert decided(4, pods(40, 40, unready=("p2", "p3"))) == 8
    assert decided(4, pods(9, 9, 0, 0, unready=("p2", "p3"))) == 4
    assert decided(4, pods(12, 12, missing=("p2", "p3"))) == 4  # filled in it would shrink: it does not turn round


def test_replicas_wanted_of_a_value_start_from_those_that_are_ready() -> None:
    reading = Reading("latency", 30.0, 10.0, Kind.VALUE)
    assert Autoscaler(WIDE, FREE).decide(0.0, 4, [reading], ready=2).replicas == math.ceil(3 * 2)

"""Refused requests: known when they come back, awaited until then, and forgotten."""

import pytest

from router.queue_lanes import DEAD_SLACK, Waiting
from router.refused import GRACE_S, MAX_KEPT, RETRY_AFTER_MAX_S, RETRY_AFTER_S, Refused, told_s, tried_before


def one(name: str, tenant: str = "t", tokens: int = 10) -> Waiting:
    return Waiting(name, tenant, 0, tokens, 0.0)


def test_one_that_comes_back_is_known_once_and_awaited_until_then() -> None:
    refused = Refused()
    refused.add(one("a"), 5.0, now=0.0)
    refused.add(one("b", tokens=30), 8.0, now=0.0)
    assert refused.tokens(1.0) == 40
    assert not refused.take(one("a", tenant="another"), 5.0)
    assert refused.take(one("a"), 5.0) and not refused.take(one("a"), 5.0)
    assert refused.tokens(5.0) == 30


def test_one_that_does_not_come_is_forgotten_a_moment_after_its_time() -> None:
    refused = Refused()
    refused.add(one("late"), 5.0, now=0.0)
    refused.add(one("gone"), 6.0, now=0.0)
    assert refused.take(one("late"), 5.0 + GRACE_S - 0.1)
    assert refused.tokens(6.0 + GRACE_S - 0.1) == 10 and refused.tokens(6.0 + GRACE_S) == 0
    assert not refused.take(one("gone"), 6.0 + GRACE_S)


def test_one_that_is_refused_again_is_awaited_once() -> None:
    refused = Refused()
    refused.add(one("a"), 5.0, now=0.0)
    refused.add(one("a"), 50.0, now=1.0)
    assert (len(refused), refused.tokens(1.0), refused.tokens(30.0)) == (1, 10, 10)
    assert refused.take(one("a"), 30.0)


def test_what_is_kept_is_bounded_whatever_clients_do() -> None:
    refused = Refused()
    for number in range(MAX_KEPT + 5):
        refused.add(one(f"r{number}"), 100.0 + number * 1e-6, now=0.0)
    assert len(refused) == MAX_KEPT and refused.tokens(0.0) == 10 * MAX_KEPT
    assert not refused.take(one("r4"), 1.0) and refused.take(one("r5"), 1.0)
    again = Refused()
    for number in range(1000):
        again.add(one("a"), 100.0, now=float(number) / 100)
    assert len(again._order) <= 2 + DEAD_SLACK


@pytest.mark.parametrize(
    ("wait_s", "told"), [(None, RETRY_AFTER_S), (0.1, RETRY_AFTER_S), (40.0, 40.0), (1e9, RETRY_AFTER_MAX_S)]
)
def test_the_time_to_come_back_is_bounded(wait_s: float | None, told: float) -> None:
    assert told_s(wait_s) == told


def test_clients_say_themselves_that_they_tried_before() -> None:
    assert tried_before((("a", "b"), ("grpc-previous-rpc-attempts", "2"))) and tried_before((("x-stainless-retry-count", "1"),))
    assert not tried_before(()) and not tried_before((("x-stainless-retry-count", "0"),))

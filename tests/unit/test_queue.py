"""The waiting room: order, fairness, bounds, cancel storms, passing, expiry."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.queue import ABSENT_LOOKS, Fit, QueueFull, QueueLimits, Waiting, WaitingQueue
from router.queue_lanes import DEAD_SLACK, MAX_REMEMBERED_TENANTS


def waiting(name: str, tenant: str = "t", priority: int = 0, tokens: int = 10, at: float = 0.0, **more: float) -> Waiting:
    return Waiting(name, tenant, priority, tokens, at, **more)


def yes(_: Waiting) -> Fit:
    return Fit.YES


def fits(*names: str):
    """Only these fit; the pools are short for all others."""
    return lambda request: Fit.YES if request.request_id in names else Fit.NO


def drained(queue: WaitingQueue) -> list[str]:
    taken = []
    while (request := queue.take(yes)) is not None:
        taken.append(request.request_id)
    return taken


def filled(*requests: Waiting, **limits: int) -> WaitingQueue:
    queue = WaitingQueue(QueueLimits(**limits))
    for request in requests:
        queue.put(request)
    return queue


def test_priority_first_then_age() -> None:
    queue = filled(
        waiting("low", priority=-1), waiting("late", at=2.0), waiting("early", at=1.0), waiting("high", priority=5, at=9.0)
    )
    assert drained(queue) == ["high", "early", "late", "low"]
    assert queue.check() == []


def test_tenants_take_turns_by_tokens() -> None:
    many = [waiting(f"a{number}", "a", at=number, tokens=10) for number in range(6)]
    few = [waiting(f"b{number}", "b", at=100 + number, tokens=20) for number in range(2)]
    assert drained(filled(*many, *few)) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "a5"]


def test_a_tenant_that_cancels_a_storm_is_no_further_back() -> None:
    queue = filled(*(waiting(f"a{number}", "a", at=number) for number in range(500)), waiting("b0", "b", at=501.0))
    for number in range(500):
        queue.remove(f"a{number}")
    queue.put(waiting("b1", "b", at=502.0))
    queue.put(waiting("a-last", "a", at=503.0))
    assert drained(queue) == ["b0", "a-last", "b1"]


def test_leaving_and_coming_back_buys_nothing() -> None:
    queue = filled(*(waiting(f"b{number}", "b", at=number) for number in range(4)), waiting("a0", "a", at=10.0, tokens=30))
    order = []
    for _ in range(6):
        request = queue.take(yes)
        assert request is not None
        order.append(request.request_id)
        if request.tenant == "a":
            queue.put(waiting(f"a{len(order)}", "a", at=20.0 + len(order), tokens=30))
    assert [name[0] for name in order] == ["b", "a", "b", "b", "b", "a"]


@pytest.mark.parametrize(
    ("limits", "limit", "bound"),
    [
        ({"max_requests": 2}, "max_requests", 2),
        ({"max_tokens": 25}, "max_tokens", 25),
        ({"max_tenant_requests": 2}, "max_tenant_requests", 2),
    ],
)
def test_a_full_queue_names_its_bound_and_changes_nothing(limits: dict[str, int], limit: str, bound: int) -> None:
    queue = filled(waiting("a"), waiting("b"), **limits)
    with pytest.raises(QueueFull, match=f"{limit} is {bound}") as caught:
        queue.put(waiting("c"))
    assert (caught.value.limit, caught.value.bound) == (limit, bound)
    assert (len(queue), queue.waiting_tokens, queue.statistics().refused, queue.check()) == (2, 20, 1, [])


def test_other_tenants_still_get_in_when_one_is_at_its_bound() -> None:
    queue = filled(waiting("a", "greedy"), max_tenant_requests=1)
    with pytest.raises(QueueFull):
        queue.put(waiting("b", "greedy"))
    queue.put(waiting("c", "modest"))


def test_what_goes_before_a_request_is_its_tenants_own_and_as_much_of_each_other() -> None:
    last = waiting("d", tokens=5)
    queue = filled(
        waiting("a"), waiting("b", "rich", tokens=100), waiting("c", "poor", tokens=4), waiting("e", priority=1, tokens=7), last
    )
    assert queue.ahead(last) == 7 + (10 + 5) + 15 + 4
    while queue.take(fits("a", "b", "e")) is not None:
        assert queue.check() == []
    assert queue.ahead(last) == 5 + 4


def test_what_is_offered_counts_also_when_it_is_refused_and_once_when_it_comes_back() -> None:
    queue = filled(waiting("a"), waiting("b"), max_requests=2)
    with pytest.raises(QueueFull):
        queue.put(waiting("c", tokens=30))
    taken = queue.take(yes)
    assert taken is not None
    queue.requeue(taken)
    queue.refuse("b")
    counts = queue.statistics()
    assert (counts.offered, counts.offered_tokens, counts.refused, counts.requests) == (3, 50, 2, 1)


def test_misuse_is_an_error() -> None:
    queue = filled(waiting("a"))
    with pytest.raises(ValueError, match="waits already"):
        queue.put(waiting("a"))
    with pytest.raises(ValueError, match="lookahead must be at least 1"):
        QueueLimits(lookahead=0)


def test_b20_a_cancel_and_a_take_of_the_same_request_meet() -> None:
    queue = filled(waiting("a"), waiting("b", at=1.0))
    assert queue.take(yes) == waiting("a")
    assert queue.remove("a") is None
    assert queue.remove("b") == waiting("b", at=1.0)
    assert queue.take(yes) is None
    assert queue.remove("b") is None
    assert (len(queue), queue.waiting_tokens, queue.statistics().removed, queue.check()) == (0, 0, 1, [])


@pytest.mark.slow
def test_b20_an_abort_storm_leaves_no_memory_behind() -> None:
    queue = filled(waiting("stays", priority=1, expires_at=1e9), max_requests=3000, max_tenant_requests=3000)
    for number in range(20_000):
        queue.put(waiting(f"r{number}", "storm", priority=1, at=float(number), expires_at=1e6))
        if number >= 1000:
            assert queue.remove(f"r{number - 1000}") is not None
    lane = queue._lanes[1]
    held = sum(len(line.heap) for line in lane.lines.values())
    assert max(held, len(queue._expiries)) <= 2 * len(queue) + DEAD_SLACK
    assert len(lane._order) <= 2 * len(lane.lines) + DEAD_SLACK
    assert queue.check() == []


@pytest.mark.slow
def test_tenants_that_left_are_forgotten_in_time() -> None:
    queue = WaitingQueue(QueueLimits())
    queue.put(waiting("stays", "stays", at=1e6))
    for number in range(5000):
        queue.put(waiting(f"r{number}", f"tenant-{number}", at=float(number)))
        assert queue.take(fits(f"r{number}")) is not None
    assert len(queue._lanes[0]._ahead) <= MAX_REMEMBERED_TENANTS


def test_a_refused_request_goes_back_to_its_place() -> None:
    queue = filled(*(waiting(name, at=number) for number, name in enumerate("abc")), max_requests=3)
    taken = queue.take(yes)
    assert taken is not None
    queue.put(waiting("d", at=3.0))
    queue.requeue(taken)
    assert drained(queue) == ["a", "b", "c", "d"]
    assert queue.statistics().requeued == 1


def test_being_refused_costs_a_tenant_nothing() -> None:
    queue = filled(
        waiting("a0", "a", at=0.0, tokens=50), waiting("b0", "b", at=1.0, tokens=50), waiting("b1", "b", at=2.0, tokens=50)
    )
    for _ in range(3):
        taken = queue.take(fits("a0"))
        assert taken is not None
        queue.requeue(taken)
    assert drained(queue) == ["a0", "b0", "b1"]


def test_b37_a_blocked_head_is_passed_a_bounded_number_of_times() -> None:
    queue = filled(
        waiting("big", at=0.0, tokens=100), *(waiting(f"s{number}", at=1.0 + number) for number in range(9)), max_passes=3
    )
    small = [f"s{number}" for number in range(9)]
    assert [queue.take(fits(*small)) is not None for _ in range(5)] == [True, True, True, False, False]
    head = queue.take(yes)
    assert head is not None
    assert (head.request_id, head.passes) == ("big", 3)
    queue.requeue(head)
    assert queue.take(fits(*small)) is None
    assert queue.remove("big") is not None
    assert queue.take(fits(*small)) is not None
    assert queue.statistics().passes == 3


def test_b37_a_blocked_head_of_a_higher_priority_holds_back_the_lower_ones_in_the_end() -> None:
    queue = filled(waiting("big", priority=1), *(waiting(f"s{number}") for number in range(5)), max_passes=1)
    assert queue.take(fits("s0", "s1")) is not None
    assert queue.take(fits("s0", "s1")) is None


def test_a_tenant_short_of_its_own_budget_holds_back_nobody_else() -> None:
    queue = filled(
        *(waiting(f"a{n}", "a", at=n) for n in range(5)), *(waiting(f"b{n}", "b", at=9.0 + n) for n in range(5)), max_passes=1
    )
    taken = [queue.take(lambda request: Fit.TENANT_SHORT if request.tenant == "a" else Fit.YES) for _ in range(6)]
    assert [request and request.request_id for request in taken] == ["b0", "b1", "b2", "b3", "b4", None]
    assert queue.statistics().passes == 0
    assert drained(queue) == [f"a{n}" for n in range(5)]


def test_one_take_looks_at_a_bounded_number() -> None:
    queue = filled(*(waiting(f"r{number}", at=number) for number in range(100)), lookahead=7)
    looked = []

    def look(request: Waiting) -> Fit:
        looked.append(request.request_id)
        return Fit.NO

    assert queue.take(look) is None
    assert looked == [f"r{number}" for number in range(7)]
    assert queue.check() == []


def test_a_take_that_fails_leaves_the_queue_whole() -> None:
    queue = filled(*(waiting(f"r{number}", at=number) for number in range(3)))

    def broken(request: Waiting) -> Fit:
        if request.request_id == "r1":
            raise LookupError("no such member")
        return Fit.NO

    with pytest.raises(LookupError):
        queue.take(broken)
    assert queue.check() == []
    assert drained(queue) == ["r0", "r1", "r2"]


def test_b40_what_waited_too_long_goes_before_any_work_is_done() -> None:
    queue = filled(waiting("a", expires_at=5.0), waiting("b", expires_at=3.0), waiting("c"), waiting("d", expires_at=4.0))
    assert queue.next_expiry() == 3.0
    assert queue.expire(2.9) == []
    queue.remove("d")
    assert [request.request_id for request in queue.expire(5.0)] == ["b", "a"]
    assert queue.next_expiry() is None
    assert drained(queue) == ["c"]
    assert queue.statistics().expired == 2


def test_statistics_tell_lengths_and_ages_by_priority() -> None:
    queue = filled(waiting("a", "x", 1, at=3.0), waiting("b", "y", 1, at=2.0), waiting("c", "x", 0, at=1.0))
    statistics = queue.statistics()
    assert (statistics.by_priority, statistics.oldest_arrived_at) == ({1: 2, 0: 1}, {1: 2.0, 0: 1.0})
    assert (statistics.requests, statistics.tokens, statistics.tenants, statistics.put) == (3, 30, 2, 3)


class DumbQueue:
    """The same rules, with a list and no cleverness: one tenant, no fairness to get wrong."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.entries: list[Waiting] = []

    def take(self, answer) -> Waiting | None:
        self.entries.sort(key=lambda request: (-request.priority, request.arrived_at))
        for place, request in enumerate(self.entries[: self.limits.lookahead]):
            if answer(request) is Fit.YES:
                for passed in range(place):
                    self.entries[passed] = replace(self.entries[passed], passes=self.entries[passed].passes + 1)
                return self.entries.pop(place)
            if request.passes >= self.limits.max_passes:
                return None
        return None


@pytest.mark.slow
@given(st.integers(0, 100_000))
def test_any_history_equals_the_dumb_queue(seed: int) -> None:
    rng = random.Random(seed)
    limits = QueueLimits(max_passes=2, lookahead=4)
    queue, dumb = WaitingQueue(limits), DumbQueue(limits)
    out: list[Waiting] = []
    for number in range(60):
        action = rng.randrange(6)
        if action <= 2:
            request = waiting(
                f"r{number}", priority=rng.randrange(2), tokens=rng.randrange(1, 9), at=float(rng.randrange(1000)) + number / 100
            )
            queue.put(request)
            dumb.entries.append(request)
        elif action == 3:
            room = rng.randrange(9)
            small = lambda request, room=room: Fit.YES if request.tokens <= room else Fit.NO  # noqa: E731
            taken = queue.take(small)
            assert taken == dumb.take(small)
            out.extend([taken] if taken else [])
        elif action == 4 and out:
            request = out.pop(rng.randrange(len(out)))
            queue.requeue(request)
            dumb.entries.append(request)
        elif action == 5 and dumb.entries:
            request = dumb.entries.pop(rng.randrange(len(dumb.entries)))
            assert queue.remove(request.request_id) == request
        assert len(queue) == len(dumb.entries)
        assert queue.waiting_tokens == sum(request.tokens for request in dumb.entries)
        assert queue.check() == []


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60))
def test_nobody_is_served_much_more_than_another_who_waits(requests: list[tuple[str, int]]) -> None:
    """While two tenants both wait, what they were served differs by at most one request of the largest size each."""
    queue = filled(*(waiting(f"r{n}", tenant, tokens=tokens, at=float(n)) for n, (tenant, tokens) in enumerate(requests)))
    served = dict.fromkeys("abc", 0)
    left = {tenant: sum(other == tenant for other, _ in requests) for tenant in "abc"}
    largest = max(tokens for _, tokens in requests)
    while (request := queue.take(yes)) is not None:
        served[request.tenant] += request.tokens
        left[request.tenant] -= 1
        busy = [served[tenant] for tenant in "abc" if left[tenant]]
        assert not busy or max(busy) - min(busy) <= 2 * largest


def test_those_whose_members_are_not_there_hold_nobody_back_and_are_passed_without_end() -> None:
    """More than one look sees, and none of them is ever barred; with very many of them the rest waits for the next look."""
    absent = [waiting(f"absent{number}", at=number) for number in range(100)]
    queue = filled(*absent, *(waiting(f"r{number}", at=200 + number) for number in range(12)), lookahead=16, max_passes=2)

    def there(request: Waiting) -> Fit:
        return Fit.ABSENT if request.request_id.startswith("absent") else Fit.YES

    assert [getattr(queue.take(there), "request_id", None) for _ in range(13)] == [*(f"r{number}" for number in range(12)), None]
    assert len(queue) == 100 and queue.statistics().passes == 0 and queue.check() == []
    for number in range(100, 16 * ABSENT_LOOKS + 20):
        queue.put(waiting(f"absent{number}", at=number))
    queue.put(waiting("behind", at=999.0))
    assert queue.take(there) is None and "behind" in queue

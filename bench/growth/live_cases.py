"""What one request costs while n others wait or run: admission and placement at the router, queues and pages at the members."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.growth.counting import Case
from engine.pages import PagePool
from lifecycle.record import AttemptKey
from router.budget import Limits
from router.member_facts import MemberInfo, MemberLoad, Role
from router.queue import Fit, QueueLimits, Waiting, WaitingQueue
from router.turnstile import AdmissionSettings, Place, Turnstile

MANY = 1 << 30
QUEUE = QueueLimits(max_requests=MANY, max_tokens=MANY, max_tenant_requests=MANY)
MEMBERS = 8


@dataclass(eq=False, slots=True)
class Known:
    """A member that tells what it is told to."""

    info: MemberInfo
    load: MemberLoad
    seen_at: float = 0.0


class Pools:
    """Both pools of a router."""

    def __init__(self, members: int, free_pages: int) -> None:
        self.now = 0.0
        self._pools = {role: [known(role, number, free_pages) for number in range(members)] for role in Role}

    def usable(self, role: Role) -> Sequence[Known]:
        """All members."""
        return self._pools[role]

    def stale_at(self, member: Known) -> float:
        """Never."""
        return member.seen_at + MANY


def known(role: Role, number: int, free_pages: int) -> Known:
    """A member with room for everything."""
    info = MemberInfo(
        name=f"{role.value}-{number}",
        incarnation=f"{role.value}-{number}",
        address="here:1",
        role=role,
        model_snapshot="m",
        page_tokens=16,
        total_pages=MANY,
        context_tokens=MANY,
        max_sequences=MANY,
        max_queued_tokens=MANY,
        computes_prompts=False,
    )
    return Known(info, MemberLoad(free_pages=free_pages))


def place(number: int, tenants: int = 50) -> Place[Known]:
    """A request in front of the turnstile."""
    waiting = Waiting(f"r{number}", f"tenant-{number % tenants}", 0, 100, float(number))
    return Place(waiting, 100, 100, AttemptKey(f"r{number}", 1))


def turnstile(pools: Pools) -> "Turnstile[Known]":
    """A router's turnstile in front of these pools."""
    return Turnstile(pools, AdmissionSettings(QUEUE, Limits()), random.Random(1))


def _request(running: int, members: int = MEMBERS) -> Callable[[], object]:
    """A whole way through the turnstile while others run; every second one has been counted by news already."""
    pools = Pools(members, MANY)
    gate, numbers = turnstile(pools), itertools.count()

    def begin() -> Place[Known]:
        one = place(next(numbers))
        gate.enter(one)
        assert [admitted is one for admitted in gate.look(pools.now)] == [True]
        assert one.admitted is not None
        gate.seated(one.admitted, pools.now)
        gate.accepted(one.admitted, pools.now)
        return one

    for number in range(running):
        gate.committed(begin(), pools.now)
        if number == running // 2:
            pools.now += 1.0
            for role in Role:
                for member in pools.usable(role):
                    member.load, member.seen_at = MemberLoad(free_pages=MANY), pools.now
            pools.now += 1.0

    def way() -> None:
        one = begin()
        gate.committed(one, pools.now)
        gate.leave(one, pools.now)

    return way


def _blocked(waiting: int) -> Callable[[], object]:
    """A request that joins others that wait for pages, looks, and leaves."""
    pools = Pools(MEMBERS, 0)
    gate, numbers = turnstile(pools), itertools.count()
    for _ in range(waiting):
        gate.enter(place(next(numbers)))
    assert list(gate.look(0.0)) == []

    def join() -> None:
        one = place(next(numbers))
        gate.enter(one)
        assert list(gate.look(0.0)) == []
        gate.leave(one, 0.0)

    return join


def _news(waiting: int) -> Callable[[], object]:
    """News of one member while requests wait that fit nowhere."""
    pools = Pools(MEMBERS, 0)
    gate, times = turnstile(pools), itertools.count(1)
    for number in range(waiting):
        gate.enter(place(number))
    assert list(gate.look(0.0)) == []

    def hear() -> None:
        member = pools.usable(Role.DECODE)[0]
        member.load, member.seen_at = MemberLoad(free_pages=1), float(next(times))
        assert list(gate.look(member.seen_at)) == []

    return hear


def _queue(waiting: int) -> Callable[[], object]:
    queue, numbers = WaitingQueue(QUEUE), itertools.count()

    def put() -> None:
        number = next(numbers)
        queue.put(Waiting(f"r{number}", f"tenant-{number % 50}", number % 3, 100, float(number)))

    for _ in range(waiting):
        put()

    def through() -> None:
        put()
        assert queue.take(lambda one: Fit.YES) is not None

    return through


def _pages(holders: int) -> Callable[[], object]:
    """Pages of one sequence taken and given back, among those of others."""
    pool = PagePool(8 * holders + 100)
    for number in range(holders):
        pool.allocate(f"h{number}", 8)
    for number in range(0, holders, 3):  # holes of the size that is asked for
        pool.release(f"h{number}")
    numbers = itertools.count(holders)

    def one() -> None:
        holder = f"h{next(numbers)}"
        pool.allocate(holder, 8)
        pool.release(holder)

    return one


def _grant(open_grants: int) -> Callable[[], object]:
    """Pages granted, committed and released, among other grants."""
    pool = PagePool(8 * open_grants + 100)
    numbers = itertools.count()
    for _ in range(open_grants):
        pool.grant(f"g{next(numbers)}", 8)

    def one() -> None:
        number = next(numbers)
        pool.grant(f"g{number}", 8)
        pool.commit_grant(f"g{number}", f"h{number}")
        pool.release(f"h{number}")

    return one


LIVE_CASES = (
    Case("router: a request's way through admission and placement", "requests running", _request),
    Case("router: one more that waits for room", "requests waiting", _blocked),
    Case("router: news of a member", "requests waiting", _news),
    Case("router: queue, put and take", "requests waiting", _queue),
    Case("pages: allocate and release 8", "sequences with pages", _pages),
    Case("pages: grant, commit, release 8", "grants open", _grant),
    Case(
        "router: a request's way",
        "members in each pool",
        lambda n: _request(10, n),
        linear="two members are drawn among those with room, which are looked for in all of them",
    ),
)
LIVE_SIZES = (10, 100, 1000, 10_000)

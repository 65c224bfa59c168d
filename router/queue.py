"""The waiting room of a router: bounded, by priority, fair between tenants, oldest first. Pure.

Inside a priority the tenant that was served least goes first (in tokens); inside a tenant the oldest request. A request that
does not fit may be passed by others behind it, but only a bounded number of times.

Order is made when something is taken, not when it is put: a tenant that queues a thousand requests and cancels them is no
further back than before. Cancelled entries stay in their heaps as dead ones until they surface or outnumber the living.
"""

import heapq
import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum

from router.queue_lanes import Entry, Heap, Lane, Scan, Waiting, first, thinned

#: For each request that one `take` looks at, so many are passed over whose members are not there.
ABSENT_LOOKS = 8


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue."""

    max_requests: int = 1024
    max_tokens: int = 4_194_304
    """Prompt tokens of everything waiting."""
    max_tenant_requests: int = 1024
    max_passes: int = 8
    """How many requests may go before one that stood in front of them and did not fit."""
    lookahead: int = 16
    """How many waiting requests one `take` looks at."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_tenant_requests", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"queue limit {name} must be at least 1")
        if self.max_passes < 0:
            raise ValueError("queue limit max_passes must be at least 0")


class Fit(Enum):
    """Whether a request can be admitted now."""

    YES = "yes"
    NO = "no"
    """The pools are short: those behind it may pass it a bounded number of times."""
    TENANT_SHORT = "tenant_short"
    """Only its tenant's own budget is short: its tenant waits, nobody else does."""
    ABSENT = "absent"
    """No member has what it needs, however empty they are: it waits, and holds nobody back."""


class QueueFull(Exception):
    """There is no room: `limit` names the bound (a field of QueueLimits), `bound` is its value. `after_s`: when to come back, in
    seconds; None where that is not known."""

    def __init__(self, limit: str, bound: int) -> None:
        super().__init__(f"the queue is full: {limit} is {bound}")
        self.limit = limit
        self.bound = bound
        self.after_s: float | None = None


class WaitTooLong(Exception):
    """A request would wait for too much of what its queue clock leaves; both in seconds, `wait_s` may be infinite. `after_s`:
    when to come back."""

    def __init__(self, wait_s: float, left_s: float, after_s: float) -> None:
        super().__init__(f"the wait would be about {wait_s:.0f} s of at most {left_s:.0f} s")
        self.wait_s = wait_s
        self.left_s = left_s
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """What waits now, and what happened since the start."""

    requests: int
    tokens: int
    by_priority: dict[int, int]
    oldest_arrived_at: dict[int, float]
    """Arrival of the oldest waiting request of each priority."""
    tenants: int
    put: int
    taken: int
    removed: int
    requeued: int
    expired: int
    refused: int
    passes: int
    offered: int
    """Requests that came, let in or not. Those that come back, after a refusal or from a member, are not counted again."""
    offered_tokens: int
    """Their prompt tokens."""
    returned: int
    """How often one came back after a refusal."""


class WaitingQueue:
    """See the module. Every operation costs O(log n); `take` that for each of the at most `lookahead` requests it looks at."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._lanes: dict[int, Lane] = {}
        self._entries: dict[str, Entry] = {}
        self._expiries: Heap = []
        self._numbers = itertools.count()
        self._tenants: dict[str, int] = {}
        self._tokens = 0
        counts = ("put", "taken", "removed", "requeued", "expired", "refused", "passes")
        self._counts = dict.fromkeys((*counts, "offered", "offered_tokens", "returned"), 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of everything waiting."""
        return self._tokens

    def put(self, waiting: Waiting, *, again: bool = False) -> None:
        """Add a new request, or `again` one that was refused before and has come back. Raises QueueFull, or ValueError when the
        id waits already."""
        if again:
            self._counts["returned"] += 1
        else:
            self._counts["offered"] += 1
            self._counts["offered_tokens"] += waiting.tokens
        for limit, bound, wanted in (
            ("max_requests", self.limits.max_requests, len(self._entries) + 1),
            ("max_tokens", self.limits.max_tokens, self._tokens + waiting.tokens),
            ("max_tenant_requests", self.limits.max_tenant_requests, self._tenants.get(waiting.tenant, 0) + 1),
        ):
            if wanted > bound:
                self._counts["refused"] += 1
                raise QueueFull(limit, bound)
        self._insert(waiting, served_back=0)
        self._counts["put"] += 1

    def requeue(self, waiting: Waiting) -> None:
        """Put a request back that was taken and then refused by a member: its age counts from its arrival and its tenant gets
        the tokens back. Bounds do not apply: it was inside them, and what is out at one time is bounded by the budgets."""
        self._insert(waiting, served_back=waiting.tokens)
        self._counts["requeued"] += 1

    def _insert(self, waiting: Waiting, served_back: int) -> None:
        if waiting.request_id in self._entries:
            raise ValueError(f"request {waiting.request_id!r} waits already")
        entry = Entry(waiting, next(self._numbers), waiting.passes)
        self._entries[waiting.request_id] = entry
        self._lanes.setdefault(waiting.priority, Lane()).insert(entry, served_back)
        self._tenants[waiting.tenant] = self._tenants.get(waiting.tenant, 0) + 1
        self._tokens += waiting.tokens
        if waiting.expires_at is not None:
            heapq.heappush(self._expiries, (waiting.expires_at, entry.number, entry))

    def take(self, fits: Callable[[Waiting], Fit]) -> Waiting | None:
        """Remove and return the first request, in order, that `fits`; None when there is none that may go.

        `fits` must not touch the queue. Those passed on the way are passed once more. One that was passed `max_passes` times
        and still does not fit holds back everything behind it, so that it gets what is freed next.
        """
        passed: list[Entry] = []
        looks = self.limits.lookahead
        for priority in sorted(self._lanes, reverse=True):
            with closing(Scan(self._lanes[priority])) as scan:
                taken, looks, barred = self._look(scan, fits, passed, looks)
            if taken is not None:
                return self._taken(taken, passed)
            if barred or not looks:
                return None
        return None

    def _look(
        self, scan: Scan, fits: Callable[[Waiting], Fit], passed: list[Entry], looks: int
    ) -> tuple[Entry | None, int, bool]:
        """The entry to take from one lane, the looks that are left, and whether an entry holds back all behind it."""
        absent = 0
        while looks and (entry := scan.next()) is not None:
            looks -= 1
            answer = fits(entry.waiting)
            if answer is Fit.YES:
                return entry, looks, False
            if answer is Fit.ABSENT:
                absent += 1
                # It cost next to nothing; and there may be many of them in front of others.
                looks += absent <= self.limits.lookahead * ABSENT_LOOKS
            elif answer is Fit.TENANT_SHORT:
                scan.skip_tenant(entry.waiting.tenant)
            elif entry.passes >= self.limits.max_passes:
                return None, looks, True
            else:
                passed.append(entry)
        return None, looks, False

    def _taken(self, entry: Entry, passed: list[Entry]) -> Waiting:
        for other in passed:
            other.passes += 1
        self._counts["passes"] += len(passed)
        self._counts["taken"] += 1
        return self._drop(entry, served=entry.waiting.tokens)

    def _drop(self, entry: Entry, served: int = 0) -> Waiting:
        waiting = entry.waiting
        del self._entries[waiting.request_id]
        lane = self._lanes[waiting.priority]
        lane.drop(entry, served)
        if not lane.living:
            del self._lanes[waiting.priority]
        left = self._tenants[waiting.tenant] - 1
        if left:
            self._tenants[waiting.tenant] = left
        else:
            del self._tenants[waiting.tenant]
        self._tokens -= waiting.tokens
        self._expiries = thinned(self._expiries, len(self._entries))
        return replace(waiting, passes=entry.passes)

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out (cancelled while queued); None when it is not here: it was taken a moment ago, or never came."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        self._counts["removed"] += 1
        return self._drop(entry)

    def ahead(self, waiting: Waiting) -> int:
        """Tokens that go before this request, which waits here and is its tenant's youngest, and its own: as far as can be told,
        since others may come that go first."""
        higher = sum(lane.tokens for priority, lane in self._lanes.items() if priority > waiting.priority)
        return higher + self._lanes[waiting.priority].ahead(waiting.tenant)

    def refuse(self, request_id: str) -> None:
        """Take a request out that was let in a moment ago and would wait in vain."""
        if self.remove(request_id) is not None:
            self._counts["refused"] += 1

    def expire(self, now: float) -> list[Waiting]:
        """Remove and return what has waited until its `expires_at`, earliest first."""
        expired = []
        while (entry := first(self._expiries)) is not None and self._expiries[0][0] <= now:
            expired.append(self._drop(entry))
        self._counts["expired"] += len(expired)
        return expired

    def next_expiry(self) -> float | None:
        """When `expire` can next return something; None when nothing expires."""
        return None if first(self._expiries) is None else self._expiries[0][0]

    def statistics(self) -> QueueStatistics:
        """Counts for metrics."""
        return QueueStatistics(
            requests=len(self._entries),
            tokens=self._tokens,
            by_priority={priority: lane.living for priority, lane in self._lanes.items()},
            oldest_arrived_at={priority: lane.oldest_arrived_at() for priority, lane in self._lanes.items()},
            tenants=len(self._tenants),
            **self._counts,
        )

    def check(self) -> list[str]:
        """Recount; sentences about what does not add up, empty when all does."""
        faults = []
        living = [entry.waiting for entry in self._entries.values()]
        if sum(waiting.tokens for waiting in living) != self._tokens:
            faults.append(f"queue: {self._tokens} tokens counted, entries add up to {sum(w.tokens for w in living)}")
        for priority, lane in self._lanes.items():
            here = sum(waiting.priority == priority for waiting in living)
            inside = sum(not item[2].dead for line in lane.lines.values() for item in line.heap)
            if not here == lane.living == inside:
                faults.append(f"queue: priority {priority} has {here} entries, {lane.living} counted, {inside} in its lines")
            tokens = sum(waiting.tokens for waiting in living if waiting.priority == priority)
            if not tokens == lane.tokens == sum(line.tokens for line in lane.lines.values()):
                faults.append(f"queue: priority {priority} has {tokens} tokens, {lane.tokens} counted")
        if sum(self._tenants.values()) != len(living):
            faults.append(f"queue: {len(living)} entries, tenants add up to {sum(self._tenants.values())}")
        return faults


__all__ = ["Fit", "QueueFull", "QueueLimits", "QueueStatistics", "WaitTooLong", "Waiting", "WaitingQueue"]

"""One priority of the waiting room: a line for each tenant, and the order in which lines are served. Pure.

See router/queue.py for the rules; this file keeps them for one priority.
"""

import heapq
import itertools
from dataclasses import dataclass, field

#: Tenants of one priority whose debt is remembered while they have nothing waiting.
MAX_REMEMBERED_TENANTS = 1024
#: Heaps are rebuilt when their dead entries outnumber the living by more than this.
DEAD_SLACK = 32


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `tokens` is what it costs its tenant (prompt tokens); times are monotonic seconds.

    `passes` counts requests that went before it while it did not fit; `take` keeps it up to date, so give the same value
    that was taken to `requeue`.
    """

    request_id: str
    tenant: str
    priority: int
    tokens: int
    arrived_at: float
    expires_at: float | None = None
    passes: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A waiting request and where it stands in the heaps that hold it."""

    waiting: Waiting
    number: int
    passes: int
    dead: bool = False


Heap = list[tuple[float, int, Entry]]


def first(heap: Heap) -> Entry | None:
    """The first living entry, which stays; dead ones before it go."""
    while heap and heap[0][2].dead:
        heapq.heappop(heap)
    return heap[0][2] if heap else None


def thinned(heap: Heap, living: int) -> Heap:
    """The heap, rebuilt when most of it is dead, so that abort storms leave no memory behind."""
    if len(heap) <= 2 * living + DEAD_SLACK:
        return heap
    kept = [item for item in heap if not item[2].dead]
    heapq.heapify(kept)
    return kept


@dataclass(slots=True, eq=False)
class Line:
    """The requests of one tenant in one priority, by age. `served` counts tokens, on the same account as the lane's floor."""

    tenant: str
    served: float
    heap: Heap = field(default_factory=list)
    living: int = 0
    tokens: int = 0
    place: int = -1
    """Number of its valid item in the lane's order; items with other numbers are stale."""


class Lane:
    """One priority: its tenants' lines, ordered by how much each was served.

    A tenant that comes starts at the floor, what the least served one had when something was last taken. One that leaves
    while ahead of the floor is remembered: leaving and coming back buys nothing.
    """

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.floor = 0.0
        self.living = 0
        self.tokens = 0
        self._ahead: dict[str, float] = {}
        self._order: list[tuple[float, float, int, Line]] = []
        self._places = itertools.count()

    def insert(self, entry: Entry, served_back: int = 0) -> None:
        """Add an entry; `served_back` tokens are taken off its tenant's account."""
        tenant = entry.waiting.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = Line(tenant, max(self.floor, self._ahead.pop(tenant, self.floor)))
            self.lines[tenant] = line
        line.served -= served_back
        heapq.heappush(line.heap, (entry.waiting.arrived_at, entry.number, entry))
        line.living += 1
        line.tokens += entry.waiting.tokens
        self.living += 1
        self.tokens += entry.waiting.tokens
        self._enter(line)

    def drop(self, entry: Entry, served: int = 0) -> None:
        """An entry has left by whatever way: it is dead from now on. Its tenant pays `served` tokens for it."""
        entry.dead = True
        line = self.lines[entry.waiting.tenant]
        line.served += served
        line.living -= 1
        line.tokens -= entry.waiting.tokens
        self.living -= 1
        self.tokens -= entry.waiting.tokens
        line.heap = thinned(line.heap, line.living)
        if not line.living:
            self._retire(line)
        elif served:
            self._enter(line)

    def _enter(self, line: Line) -> None:
        """Give the line a fresh place in the order; its old one becomes stale."""
        head = first(line.heap)
        if head is None:
            return
        line.place = next(self._places)
        heapq.heappush(self._order, (line.served, head.waiting.arrived_at, line.place, line))
        if len(self._order) > 2 * len(self.lines) + DEAD_SLACK:
            self._order = [item for item in self._order if item[3].place == item[2]]
            heapq.heapify(self._order)

    def _retire(self, line: Line) -> None:
        del self.lines[line.tenant]
        line.place = -1
        if line.served > self.floor:
            self._ahead[line.tenant] = line.served
        if len(self._ahead) > MAX_REMEMBERED_TENANTS:
            by_debt = sorted(self._ahead.items(), key=lambda item: -item[1])[: MAX_REMEMBERED_TENANTS // 2]
            self._ahead = {tenant: served for tenant, served in by_debt if served > self.floor}

    def next_line(self) -> Line | None:
        """Take the least served line out of the order (give it back with `return_line`); None when none is left."""
        while self._order:
            _, _, place, line = heapq.heappop(self._order)
            if line.place == place:
                line.place = -1
                return line
        return None

    def return_line(self, line: Line) -> None:
        """Put a line that `next_line` gave back into the order."""
        if line.living:
            self._enter(line)

    def ahead(self, tenant: str) -> int:
        """Tokens of a tenant, and of each other at most as many: what goes before its youngest request, that included, when all
        lines begin level."""
        own = self.lines[tenant].tokens
        return sum(min(line.tokens, own) for line in self.lines.values())

    def oldest_arrived_at(self) -> float:
        """Arrival of the oldest entry, monotonic seconds. The lane must not be empty."""
        heads = (first(line.heap) for line in self.lines.values())
        return min(head.waiting.arrived_at for head in heads if head is not None)


class Scan:
    """One look along a lane in the order in which it would be served. What was looked at goes back with `close`."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._virtual: list[tuple[float, int, Line]] = []
        self._lines: list[Line] = []
        self._items: list[tuple[Line, tuple[float, int, Entry]]] = []
        self._steps = itertools.count()
        self._pending: Line | None = lane.next_line()

    def next(self) -> Entry | None:
        """The next entry, as if all before it had been served; None at the end of the lane."""
        while (line_at := self._least()) is not None:
            served, line = line_at
            if first(line.heap) is None:
                continue
            item = heapq.heappop(line.heap)
            self._items.append((line, item))
            heapq.heappush(self._virtual, (served + item[2].waiting.tokens, next(self._steps), line))
            return item[2]
        return None

    def _least(self) -> tuple[float, Line] | None:
        """The line to look at now: one not seen yet, or one seen, at what it would have been served by then."""
        fresh = self._pending
        if fresh is not None and (not self._virtual or fresh.served <= self._virtual[0][0]):
            self._lines.append(fresh)
            self._pending = self.lane.next_line()
            return fresh.served, fresh
        if not self._virtual:
            return None
        served, _, line = heapq.heappop(self._virtual)
        return served, line

    def skip_tenant(self, tenant: str) -> None:
        """Look at nothing more of this tenant."""
        self._virtual = [item for item in self._virtual if item[2].tenant != tenant]
        heapq.heapify(self._virtual)

    def close(self) -> None:
        """Everything that was looked at stands where it stood. The floor rises to the least served line."""
        if self._lines:
            self.lane.floor = max(self.lane.floor, self._lines[0].served)
        for line, item in self._items:
            heapq.heappush(line.heap, item)
        for line in self._lines:
            self.lane.return_line(line)
        if self._pending is not None:
            self.lane.return_line(self._pending)

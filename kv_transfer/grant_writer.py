"""How a writer fills its grants: which parts are posted, what they pin, who waits until a grant is still. Pure.

The engine thread of the member that owns the source pages drives it; a transfer thread does the writing and tells the ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.grants import AnswerNow, DrainAnswer, Drained, Draining, Filled, WriterBook, WriterOutcome, WriterStatistics
from kv_transfer.offer import Endpoint
from kv_transfer.plan import Computed, HandoverPlan, PagePart
from kv_transfer.ports import Push, PushResult

#: Drains of one grant that wait for its writes. Of more the oldest are forgotten: their calls have ended.
ASKERS_MAX = 64

#: Why a grant that lost one of its writes will not be filled.
TRANSFER_FAILED = "transfer_failed"


class PagePins(Protocol):
    """The allocator of one KV group, as far as a writer needs it."""

    def pin(self, pin_id: str, pages: Sequence[int]) -> None:
        """Keep owned pages from becoming free."""

    def unpin(self, pin_id: str) -> int:
        """End a pin; returns how many pages it held."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Agents that will be written to, writes to post, and ids of writes that need not be posted any more."""

    connects: tuple[Endpoint, ...]
    pushes: tuple[Push, ...]
    withdrawals: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.connects or self.pushes or self.withdrawals)


@dataclass(frozen=True, slots=True)
class PushesEnded:
    """The transfer thread is done with these pushes.

    post_s: seconds it spent posting them. done_at: when it saw them done, in monotonic seconds; the engine thread learns of
    it later, at the end of its step.
    """

    results: tuple[PushResult, ...]
    post_s: float
    done_at: float


@dataclass(slots=True)
class Filling:
    """One grant being filled. tables: the source's pages, one table per KV group. Times are monotonic seconds.

    problem: what the transport said about the first write that failed, for people.
    """

    plan: HandoverPlan
    tables: tuple[Sequence[int], ...] = ()
    posted: set[int] = field(default_factory=set)
    first_unposted: int = 0
    in_flight: set[int] = field(default_factory=set)
    first_post_at: float | None = None
    last_done_at: float = 0.0
    post_s: float = 0.0
    problem: str = ""
    withdrawn: bool = False

    @property
    def grant_id(self) -> str:
        """The grant."""
        return self.plan.grant.grant_id

    @property
    def seconds(self) -> float:
        """First post to the last write done; 0 while nothing was posted."""
        return 0.0 if self.first_post_at is None else max(0.0, self.last_done_at - self.first_post_at)


class GrantWriter:
    """All grants that one member fills. `answer` gets the answer to each Drain: who asked, whether every write had been done."""

    def __init__(self, book: WriterBook, pools: Sequence[PagePins], answer: Callable[[int, bool], None]) -> None:
        self._book = book
        self._pools = tuple(pools)
        self._answer = answer
        self._fillings: dict[str, Filling] = {}
        self._flights: dict[int, tuple[Filling, int, int]] = {}  # filling, part, bytes
        self._askers: dict[str, deque[int]] = {}
        self._push_ids = 0
        self._connects: list[Endpoint] = []
        self._pushes: list[Push] = []
        self._withdrawals: list[int] = []
        self.pushed_bytes = 0

    # filling

    def accept(self, plan: HandoverPlan, now: float) -> Filling:
        """Take a grant in and let the transfer thread meet its agent. Raises GrantRevoked, DuplicateGrant, GrantsFull."""
        self._book.accept(plan.grant, now)
        self._connects.append(plan.grant.endpoint)
        filling = self._fillings[plan.grant.grant_id] = Filling(plan)
        return filling

    def begin(self, filling: Filling, tables: tuple[Sequence[int], ...]) -> None:
        """The source has its pages: parts may be posted from now on."""
        filling.tables = tables
        self._book.begin(filling.grant_id, len(filling.plan.parts))

    def send(self, filling: Filling, computed: Computed, landing_row: int, now: float) -> None:
        """Post the parts that are ready and were not posted. Whether the grant is still ours is asked before each.

        landing_row: the source's row of logits; not looked at until the landing part is ready.
        """
        while filling.first_unposted in filling.posted:
            filling.first_unposted += 1
        for part in filling.plan.ready(computed, filling.first_unposted):
            if part in filling.posted:
                continue
            if not self._book.may_post(filling.grant_id, now):
                return
            push_id = self._push_ids
            self._push_ids += 1
            push = filling.plan.push(push_id, part, filling.tables, landing_row)
            self._pushes.append(push)
            self._book.posted(filling.grant_id, part)
            self._flights[push_id] = (filling, part, push.size_bytes)
            self._pin(filling, part, push_id)
            filling.posted.add(part)
            filling.first_post_at = now if filling.first_post_at is None else filling.first_post_at

    def ended(self, pushes: PushesEnded) -> list[WriterOutcome]:
        """Writes have ended; what became of their grants, one outcome for each write."""
        outcomes = []
        for result in pushes.results:
            filling, part, size_bytes = self._flights.pop(result.push_id)
            self.pushed_bytes += size_bytes if result.ok else 0
            self._unpin(filling, part, result.push_id)
            filling.last_done_at = max(filling.last_done_at, pushes.done_at)
            filling.post_s += pushes.post_s / len(pushes.results)
            if not result.ok and not filling.problem:
                filling.problem = f"{result.cause}: {result.detail}"
            outcome = self._book.finished(filling.grant_id, part, None if result.ok else TRANSFER_FAILED)
            outcomes.append(self._noted(outcome))
        return outcomes

    # stopping

    def heard(self, now: float) -> list[WriterOutcome]:
        """A turn of the engine thread: after a gap longer than the lease every open grant is given up. See WriterBook."""
        return [self._noted(outcome) for outcome in self._book.heard(now)]

    def fail(self, grant_id: str, cause: str) -> WriterOutcome | None:
        """Give a grant up. None when it is not open."""
        outcome = self._book.fail(grant_id, cause)
        return self._noted(outcome) if outcome is not None else None

    def drain(self, grant_id: str, asker: int) -> DrainAnswer:
        """The reader wants a grant back. `asker` is answered now, or when the last write has ended."""
        found = self._fillings.get(grant_id)
        answer = self._book.drain(grant_id)
        if isinstance(answer, AnswerNow):
            self._answer(asker, answer.committed)
            self._fillings.pop(grant_id, None)
        else:
            self._askers.setdefault(grant_id, deque(maxlen=ASKERS_MAX)).append(asker)
            assert found is not None, f"grant {grant_id} is open in the book and not here"
            self._withdraw(found)
        return answer

    # reading

    @property
    def open(self) -> int:
        """Grants that have not ended."""
        return len(self._fillings)

    @property
    def pushes_in_flight(self) -> int:
        """Writes given out whose end was not told."""
        return len(self._flights)

    @property
    def drains_waiting(self) -> int:
        """Drains that wait for writes to end."""
        return sum(len(askers) for askers in self._askers.values())

    def take_transfers(self) -> Transfers:
        """What the transfer thread is to do since the last call."""
        transfers = Transfers(tuple(self._connects), tuple(self._pushes), tuple(self._withdrawals))
        self._connects, self._pushes, self._withdrawals = [], [], []
        return transfers

    def statistics(self) -> WriterStatistics:
        """Counts of the book."""
        return self._book.statistics()

    def open_ids(self) -> list[str]:
        """Every grant that has not ended."""
        return self._book.open_ids()

    def check(self) -> list[str]:
        """Sentences about anything that does not add up; empty when all is well."""
        faults = self._book.check()
        if set(self._book.open_ids()) != set(self._fillings):
            faults.append("open grants and grants being filled are not the same")
        if {push for one in self._fillings.values() for push in one.in_flight} != set(self._flights):
            faults.append("pinned pages and writes in flight are not the same")
        if not set(self._askers) <= set(self._fillings):
            faults.append("a Drain waits for a grant that has ended")
        return faults

    # inside

    def _pin(self, filling: Filling, part: int, push_id: int) -> None:
        """The pages of this part cannot be reused while the write reads them, whatever becomes of their holder."""
        filling.in_flight.add(push_id)
        one = filling.plan.parts[part]
        if isinstance(one, PagePart):
            table = filling.tables[one.group]
            self._pools[one.group].pin(str(push_id), [table[number] for number in one.page_numbers])

    def _unpin(self, filling: Filling, part: int, push_id: int) -> None:
        filling.in_flight.discard(push_id)
        one = filling.plan.parts[part]
        if isinstance(one, PagePart):
            self._pools[one.group].unpin(str(push_id))

    def _noted(self, outcome: WriterOutcome) -> WriterOutcome:
        if isinstance(outcome, Filled | Drained):
            del self._fillings[outcome.grant_id]
            for asker in self._askers.pop(outcome.grant_id, ()):
                self._answer(asker, False)
        elif isinstance(outcome, Draining):
            self._withdraw(self._fillings[outcome.grant_id])
        return outcome

    def _withdraw(self, filling: Filling) -> None:
        if not filling.withdrawn:
            filling.withdrawn = True
            self._withdrawals += filling.in_flight

"""The port to the request store: records, reservations, cancels and leases shared by the routers of a cell.

The router that serves a request owns its record and keeps a copy of it; the copy leads. Only the owner enters states, so
`advance` and `finish` bring the stored record up to the copy, whatever was written or lost before: doing it twice, late or
after an outage comes to the same. Other routers may flag a cancel, and reap when the owner's lease has run out.

All times are wall-clock seconds since the epoch of the calling router. Every method but `statistics` raises StoreUnavailable when
the store does not answer in time: whether the call took effect is not known then, and calling again is always safe.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from lifecycle.finish import Ending
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.budget import Claim, Shortage
from router.placement import Placement
from router.store_totals import StoreTotals


class StoreUnavailable(Exception):
    """The store did not answer `operation` within its time limit. Try again after `retry_after_s` seconds."""

    def __init__(self, operation: str, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"request store unavailable during {operation}: {reason}")
        self.operation = operation
        self.retry_after_s = retry_after_s


class CreateOutcome(Enum):
    """What `create` found."""

    CREATED = "created"
    """A new record: this router runs the request."""
    EXISTING = "existing"
    """The same request was created before, here or elsewhere: do not run it again; `record` is how it stands."""
    CONFLICT = "conflict"
    """The id belongs to a request with another body; `record` is that one. Nothing was changed."""
    ALREADY_CANCELLED = "already_cancelled"
    """A cancel came first: `record` is a new one that is CANCELLED already. Do no work."""


@dataclass(frozen=True, slots=True)
class CreateResult:
    """`record` is the stored one; with CREATED it equals the argument."""

    outcome: CreateOutcome
    record: RequestRecord


class WriteOutcome(Enum):
    """What became of a write to a record."""

    APPLIED = "applied"
    """The store now holds what was asked for (also when an earlier call had done it)."""
    SHORT = "short"
    """A budget is short; see `shortage`."""
    UNKNOWN = "unknown"
    """No such record: the store lost its memory, or the record's time is over. `assert_live` writes it anew."""
    OTHER_OWNER = "other_owner"
    """Another router owns the record."""
    OTHER_ATTEMPT = "other_attempt"
    """The record is at another attempt than the caller's."""
    NO_EDGE = "no_edge"
    """The transitions do not follow the table. Nothing was changed."""
    ENDED = "ended"
    """The record had ended; `ending` says how. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class CancelFlag:
    """A cancel as noted on a record: wall time of the first one, in seconds, and its reason."""

    requested_at: float
    reason: str


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Where the record stands after a write. `state` is None and `attempt` 0 when there is no record.

    `cancel` is the truth about a cancel at the moment of the write: look at it after each one. (The passed record learns of
    it too: its cancel_requested_at and cancel_reason are filled in.)
    """

    outcome: WriteOutcome
    state: State | None = None
    attempt: int = 0
    cancel: CancelFlag | None = None
    ending: Ending | None = None
    shortage: Shortage | None = None

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel is flagged."""
        return self.cancel is not None

    @property
    def applied(self) -> bool:
        """Whether the store holds what was asked for."""
        return self.outcome is WriteOutcome.APPLIED


@dataclass(frozen=True, slots=True)
class BeginResult:
    """`ticket` is what became of the first attempt of a record that was CREATED; None when it was there already."""

    created: CreateResult
    ticket: WriteResult | None = None


@dataclass(frozen=True, slots=True)
class FinishResult:
    """`won` is whether the caller's ending is the request's ending. `record` is the stored record after the call (the
    winner's when another one won), None when `outcome` is UNKNOWN."""

    won: bool
    outcome: WriteOutcome
    record: RequestRecord | None


class CancelOutcome(Enum):
    """What `request_cancel` did."""

    ACCEPTED = "accepted"
    ALREADY_ENDED = "already_ended"
    NOT_THEIRS = "not_theirs"
    """The record is another tenant's: nothing was done."""


@dataclass(frozen=True, slots=True)
class CancelResult:
    """`state` is None for an id never seen (a tombstone was left). `owner` is the router that was told, empty when none."""

    outcome: CancelOutcome
    state: State | None
    ending: Ending | None
    owner: str


@dataclass(frozen=True, slots=True)
class Reservations:
    """Everything an admitted attempt is to hold: its members and its claims."""

    placement: Placement
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A live record of this router, with what its attempt holds (None while nothing is held)."""

    record: RequestRecord
    holds: Reservations | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """A router that owns records: whether its lease holds, where other routers reach it ("" when it has not said), and whether
    one without a lease may live (`unsure`), because the store has lost its memory or was away just now."""

    alive: bool
    address: str
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Orphan:
    """A live request, and the router that owned it when it was looked at."""

    request_id: str
    router: str


class AdoptOutcome(Enum):
    """What became of an adoption."""

    ADOPTED = "adopted"
    """The request is this router's now."""
    ALIVE = "alive"
    """Its owner lives."""
    UNTIMELY = "untimely"
    """This router may not judge whether its owner lives now."""
    GONE = "gone"
    """It has ended, or another router owns it."""


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """With ADOPTED the record as stored, and what its attempt holds (None: nothing)."""

    outcome: AdoptOutcome
    record: RequestRecord | None = None
    holds: Reservations | None = None


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What one round of reaping did."""

    ended: tuple[str, ...] = ()
    """Ids of requests of dead routers that were ended."""
    released: int = 0
    """Reservations without a live request that were given back."""
    dead_routers: tuple[str, ...] = ()
    seated: tuple[Orphan, ...] = ()
    """Requests of dead routers that were spared: their decode member may still have the seat."""


@dataclass(frozen=True, slots=True)
class StoreBooks:
    """What the store holds for the cell now."""

    live_requests: int
    tombstones: int
    reserved: Mapping[str, int]
    """Units by budget label; a budget that holds nothing is not listed."""
    routers: Mapping[str, float]
    """Seconds left of each router's lease, negative for one that ran out."""
    faults: tuple[str, ...] = ()
    """Sentences about what does not add up."""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """Whether the store answers, how fast (seconds), and what it says it is."""

    ok: bool
    latency_s: float
    server: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Calls of one operation since the start: how many, how many failed, their time in seconds."""

    calls: int = 0
    errors: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """For metrics. `observe` callbacks (see RedisStore) give each call's time for histograms."""

    operations: Mapping[str, OperationStatistics] = field(default_factory=dict)
    available: bool = True
    """Whether the last call was answered."""
    lease_lapses: int = 0
    """How often this router's lease had run out before it was renewed: others may have reaped its requests."""
    forgets: int = 0
    """How often the store was found to have restarted or failed over: writes that it had acknowledged may be missing."""


class Store(Protocol):
    """The request store as one router sees it."""

    @property
    def router(self) -> str:
        """The name (with incarnation) under which this router owns records."""

    @property
    def leased_since(self) -> float | None:
        """Monotonic time since which this router's lease holds without a gap; None when it may have run out."""

    async def create(self, record: RequestRecord) -> CreateResult:
        """Store a new record (state CREATED, `record.router` this router), or say what is there already.

        Concurrent creates of one id have one CREATED. With a tombstone the record is stored as CANCELLED. Raises StoreUnavailable
        too while the store may lack the record of that id, see `check_settled`.
        """

    async def begin(self, record: RequestRecord, holds: Reservations, at: float) -> BeginResult:
        """As `create`, accepted at wall time `at`, and then `admit`, in one step; the passed record is advanced to match.

        The record is QUEUED unless the ticket was given. Whoever gets no answer may have left it ADMITTED, with its holds.
        """

    async def admit(self, record: RequestRecord, holds: Reservations, at: float) -> WriteResult:
        """Take all claims for the record's attempt, or none, and follow the edge TICKET at wall time `at`.

        With APPLIED the passed record was advanced too and names its members. SHORT changes nothing. A flagged cancel
        does not refuse the ticket: look at `cancel_requested`.
        """

    async def advance(self, record: RequestRecord) -> WriteResult:
        """Bring the stored record up to the transitions and progress of `record`, which the caller has advanced already.

        Entering QUEUED or a terminal state gives back everything held; entering DECODING gives back prompt tokens.
        """

    async def retry(
        self, record: RequestRecord, event: Event, holds: Reservations | None, at: float, detail: str = ""
    ) -> WriteResult:
        """Begin the next attempt after `event` (REFUSED, PREFILL_LOST or DECODE_LOST, with the label of what was lost as
        `detail`): the old attempt's reservations go back and `holds` are taken in the same step.

        APPLIED: the record is ADMITTED at attempt + 1. SHORT, or `holds` None (then APPLIED): it is QUEUED at
        attempt + 1 and holds nothing; so it is in the passed record after StoreUnavailable too, and the next write makes it
        so in the store. The passed record is changed to match. Other outcomes change nothing. Raises IllegalTransition when
        the record's state has no edge for `event`.
        """

    async def request_cancel(self, request_id: str, reason: str, at: float, tenant: str = "") -> CancelResult:
        """Flag a cancel and tell the owner, whatever the state; an id never seen leaves a tombstone for 60 s. `tenant`: it is
        about a request of that tenant alone, also one that is still to come; empty: about anybody's.

        The first cancel's time and reason stay. The state changes when the owner observes it (Event.CANCEL).
        """

    async def finish(self, record: RequestRecord) -> FinishResult:
        """Write the end of a request, once: `record` has ended, with its `ending`, counts and times.

        Compare-and-set on the attempt and on not having ended; releases every reservation of the request. Who comes
        second gets the winner's record. With UNKNOWN the record is written as it is, so `won` is True and nothing is lost
        with a store that forgot.
        """

    async def wait_ended(self, request_id: str, timeout_s: float) -> RequestRecord | None:
        """The record once it has ended, looked at again and again; as it is when `timeout_s` is over; None when unknown."""

    async def get(self, request_id: str) -> RequestRecord | None:
        """The record as stored, None when there is none. It is a copy: changing it changes nothing."""

    async def check_settled(self) -> None:
        """Whether an id without a record is that of no request. Raises StoreUnavailable while that is not known: the store
        restarted, failed over or came back empty, and routers that live may still have to tell it what it lacks."""

    async def assert_live(self, live: Sequence[LiveRequest]) -> dict[str, WriteResult]:
        """Write live records of this router again (every few seconds, and after an outage): missing ones are made anew with
        their reservations, those behind are brought up, and their time to live starts again. Result by request id.

        Reservations are taken back without looking at limits: the members hold them already.
        """

    async def heartbeat(self, address: str = "") -> frozenset[str]:
        """Renew this router's lease (5 s; call every second), with the address (host:port) at which other routers reach it.
        Returns the ids of its requests with a cancel flagged."""

    async def owner(self, router: str) -> Owner:
        """Whether a router lives, by the store's clock, and where it is."""

    async def leave(self) -> None:
        """Give up this router's lease at once, so that others need not wait for it to run out."""

    async def adopt(self, orphan: Orphan, *, seatless: bool = False) -> AdoptResult:
        """Take a live request over from a router whose lease ran out, with everything that it holds: compare-and-set on its
        owner. As with `reap`, only a router whose own lease has held for long enough may. The caller runs it or ends it. With
        `seatless` only one that is still before its seat is taken.
        """

    async def reap(self, at: float, *, spare_seated: bool = False) -> ReapReport:
        """End the live requests of routers whose lease ran out, and give back reservations of requests that are gone.

        With `spare_seated` those are left alone whose decode member may still have their seat: see `adopt`.

        An orphan with a cancel flagged ends CANCELLED, any other FAILED with the cause router_lost. Any router may call it,
        any number at once; a bounded number of requests is handled in a call. Only a router whose own lease is fresh, and
        has been for a lease's time, ends requests of others: after an outage of the store nobody could renew.
        """

    async def books(self) -> StoreBooks:
        """Everything held, recounted, with `faults`. For the admin check and tests: it reads all of the cell's keys."""

    async def totals(self, labels: Sequence[str]) -> StoreTotals:
        """What the budgets of these labels hold for all routers, and who these are. Cheap: it looks at no request."""

    def cancel_hints(self) -> AsyncGenerator[str, None]:
        """Ids of this router's requests that were just cancelled. Hints only: they can be lost, `heartbeat` has them all.

        Goes on through outages and never ends by itself; close it with `contextlib.aclosing`.
        """

    async def health(self) -> StoreHealth:
        """Ask the server for a sign of life. Never raises."""

    def statistics(self) -> StoreStatistics:
        """Calls, errors and times by operation."""

    async def close(self) -> None:
        """Close every connection. The lease is not given up: see `leave`."""

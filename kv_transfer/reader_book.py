"""The reader's grants: which pages a writer may touch, what has arrived, and when the pages are free again. Pure.

A page of a grant has two owners, the reader and the writer. It is free only when the writer has said that it stopped (Drain
answered) or was cut off (fence). No clock frees a page: an expired grant is only asked back.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.grant_states import (
    READER_TABLE,
    READER_TERMINAL,
    DuplicateGrant,
    GrantsFull,
    IllegalGrantEvent,
    ReaderEvent,
    ReaderState,
    step,
)
from kv_transfer.offer import Grant, Peer
from kv_transfer.plan import BadNotice, Notice, part_count, sent_page_counts
from lifecycle.record import AttemptKey

READER_GRANTS_MAX = 4096
# Ended ids that are remembered, only to tell a late notice from one that was never ours.
READER_ENDED_MAX = 4 * READER_GRANTS_MAX

REFUSED_COUNTS = "counts"
REFUSED_LAYOUT = "layout_mismatch"
REFUSED_PARTS = "parts"
REFUSED_CONTENT = "content"

UNKNOWN_GRANT = "unknown_grant"
UNKNOWN_LATE = "late"
UNKNOWN_REVOKED = "revoked"
UNKNOWN_WRITER = "wrong_writer"
UNKNOWN_NOTICE = "bad_notice"
UNKNOWN_CAUSES = (UNKNOWN_GRANT, UNKNOWN_LATE, UNKNOWN_REVOKED, UNKNOWN_WRITER, UNKNOWN_NOTICE)


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Whom to ask to stop writing into which grant."""

    grant_id: str
    key: AttemptKey
    writer: Peer


@dataclass(frozen=True, slots=True)
class Counted:
    """A part arrived; `missing` parts are still to come. A part that arrived before changes nothing (`duplicate`)."""

    grant_id: str
    missing: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """Every part has arrived: pages, and a landing row if any, are filled. handover_s: first part to last, in seconds."""

    grant_id: str
    key: AttemptKey
    handover_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A notice that does not fit the offer. The grant is revoked: `order` says whom to ask to stop."""

    grant_id: str
    cause: str
    order: DrainOrder


@dataclass(frozen=True, slots=True)
class Unknown:
    """A notice for nothing that is open, counted and forgotten. `cause` is one of UNKNOWN_CAUSES."""

    grant_id: str
    cause: str


Outcome = Counted | Committed | Refused | Unknown


@dataclass(frozen=True, slots=True)
class Freed:
    """A grant that a fence ended. `before` OFFERED means that its attempt loses its prefill by this."""

    grant_id: str
    key: AttemptKey
    before: ReaderState


@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """Open grants now, and events since the start."""

    offered: int
    revoking: int
    quarantined: int
    offers: int
    commits: int
    reclaimed: int
    fenced: int
    duplicate_parts: int
    unknown_renewals: int
    refusals: dict[str, int]
    unknown: dict[str, int]


@dataclass(slots=True)
class _Open:
    grant: Grant
    writer: Peer
    page_counts: tuple[int, ...]
    parts: int
    heard_at: float
    state: ReaderState = ReaderState.OFFERED
    arrived: int = 0  # bitmap
    first_at: float | None = None

    def order(self) -> DrainOrder:
        return DrainOrder(self.grant.grant_id, self.grant.key, self.writer)


@dataclass(slots=True)
class _Counts:
    offers: int = 0
    commits: int = 0
    reclaimed: int = 0
    fenced: int = 0
    duplicate_parts: int = 0
    unknown_renewals: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)


class ReaderBook:
    """All grants of one decode member. Every method names the grant; times are monotonic seconds.

    landed: whether what a notice with a checksum of its content tells is what lies here; None leaves it unlooked at.
    """

    def __init__(
        self,
        grants_max: int = READER_GRANTS_MAX,
        ended_max: int = READER_ENDED_MAX,
        landed: Callable[[Grant, Notice], bool] | None = None,
    ) -> None:
        self._landed = landed
        self._grants_max = grants_max
        self._ended_max = ended_max
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, ReaderState] = OrderedDict()
        self._counts = _Counts()

    def offer(self, grant: Grant, writer: Peer, now: float) -> None:
        """Open a grant for one writer incarnation. Raises GrantsFull, or DuplicateGrant."""
        known = self.state(grant.grant_id)
        if known is not None:
            raise DuplicateGrant(grant.grant_id, known.value)
        if len(self._open) >= self._grants_max:
            raise GrantsFull(self._grants_max)
        self._open[grant.grant_id] = _Open(grant, writer, sent_page_counts(grant), part_count(grant), now)
        self._counts.offers += 1

    def state(self, grant_id: str) -> ReaderState | None:
        """Where a grant stands; None when it was never here or has been forgotten."""
        found = self._open.get(grant_id)
        return found.state if found else self._ended.get(grant_id)

    def arrived(self, writer_incarnation: str, notice: Notice | bytes, now: float) -> Outcome:
        """Take one notice that the receiving agent of `writer_incarnation` got. Never raises for what a peer sent."""
        if isinstance(notice, bytes):
            try:
                notice = Notice.from_bytes(notice)
            except BadNotice:
                return self._unknown("", UNKNOWN_NOTICE)
        found = self._open.get(notice.grant_id)
        if found is None:
            return self._unknown(notice.grant_id, UNKNOWN_LATE if notice.grant_id in self._ended else UNKNOWN_GRANT)
        if found.writer.incarnation != writer_incarnation:
            return self._unknown(notice.grant_id, UNKNOWN_WRITER)
        if found.state is not ReaderState.OFFERED:
            return self._unknown(notice.grant_id, UNKNOWN_REVOKED)
        cause = _misfit(found, notice)
        if not cause and notice.content_crc32 is not None and self._landed is not None:
            cause = "" if self._landed(found.grant, notice) else REFUSED_CONTENT
        if cause:
            self._counts.refusals[cause] = self._counts.refusals.get(cause, 0) + 1
            self._step(found, ReaderEvent.REVOKE)
            return Refused(notice.grant_id, cause, found.order())
        return self._count(found, notice, now)

    def renew(self, grant_id: str, now: float) -> bool:
        """A sign of life: the grant's expiry starts again. False (and counted) when the id is not open."""
        found = self._open.get(grant_id)
        if found is None or found.state is not ReaderState.OFFERED:
            self._counts.unknown_renewals += 1
            return False
        found.heard_at = max(found.heard_at, now)
        return True

    def expired(self, now: float) -> list[str]:
        """Grants that showed no sign of life for their expires_after_s: revoke them. Looks at every grant, whatever its age."""
        offered = (e for e in self._open.values() if e.state is ReaderState.OFFERED)
        return [e.grant.grant_id for e in offered if now - e.heard_at >= e.grant.expires_after_s]

    def revoke(self, grant_id: str) -> DrainOrder | None:
        """Take a grant back: whom to ask to stop. Asked again: the same. None when it is not open (it ended, or never was)."""
        found = self._open.get(grant_id)
        if found is None:
            return None
        self._step(found, ReaderEvent.REVOKE)
        return found.order()

    def drained(self, grant_id: str) -> bool:
        """The writer answered that nothing is in flight and nothing will start. True: the pages are free now.

        False for an id that is not open (a late answer). Raises IllegalGrantEvent when the grant was never revoked.
        """
        found = self._open.get(grant_id)
        if found is None:
            return False
        self._step(found, ReaderEvent.DRAINED)
        return True

    def unanswered(self, grant_id: str) -> bool:
        """The writer could not be asked: the pages are quarantined. False for an id that is not open.

        Raises IllegalGrantEvent when the grant was never revoked.
        """
        found = self._open.get(grant_id)
        if found is None:
            return False
        self._step(found, ReaderEvent.UNANSWERED)
        return True

    def fenced(self, writer_incarnation: str) -> list[Freed]:
        """No write of that incarnation can land any more: all its open grants end and their pages are free now."""
        mine = [e for e in self._open.values() if e.writer.incarnation == writer_incarnation]
        freed = [Freed(e.grant.grant_id, e.grant.key, e.state) for e in mine]
        for entry in mine:
            self._step(entry, ReaderEvent.FENCED)
        self._counts.fenced += len(freed)
        return freed

    def unsettled(self) -> list[DrainOrder]:
        """Grants that were taken back and whose writer is not known to have stopped: ask (again)."""
        waiting = (ReaderState.REVOKING, ReaderState.QUARANTINED)
        return [e.order() for e in self._open.values() if e.state in waiting]

    def open_of(self, writer_incarnation: str) -> list[str]:
        """Open grants of one writer incarnation."""
        return [e.grant.grant_id for e in self._open.values() if e.writer.incarnation == writer_incarnation]

    def statistics(self) -> ReaderStatistics:
        """Counts; gauges are recounted from the open grants."""
        states = [e.state for e in self._open.values()]
        c = self._counts
        return ReaderStatistics(
            offered=states.count(ReaderState.OFFERED),
            revoking=states.count(ReaderState.REVOKING),
            quarantined=states.count(ReaderState.QUARANTINED),
            offers=c.offers,
            commits=c.commits,
            reclaimed=c.reclaimed,
            fenced=c.fenced,
            duplicate_parts=c.duplicate_parts,
            unknown_renewals=c.unknown_renewals,
            refusals=dict(c.refusals),
            unknown=dict(c.unknown),
        )

    def check(self) -> list[str]:
        """Sentences about anything that does not add up; empty when all is well."""
        faults = []
        for grant_id, entry in self._open.items():
            if entry.state in READER_TERMINAL or grant_id in self._ended:
                faults.append(f"grant {grant_id} is open and ended ({entry.state.value})")
            if entry.arrived >= (1 << entry.parts) - 1:
                faults.append(f"grant {grant_id} has {entry.arrived.bit_count()} of {entry.parts} parts and is not committed")
        if len(self._open) > self._grants_max:
            faults.append(f"{len(self._open)} grants are open, above {self._grants_max}")
        c = self._counts
        if c.offers != len(self._open) + c.commits + c.reclaimed:
            faults.append(f"{c.offers} offers are not {len(self._open)} open, {c.commits} committed and {c.reclaimed} reclaimed")
        return faults

    def _count(self, found: _Open, notice: Notice, now: float) -> Outcome:
        if found.first_at is None:
            found.first_at = now
        found.heard_at = max(found.heard_at, now)
        duplicate = bool(found.arrived >> notice.part & 1)
        self._counts.duplicate_parts += duplicate
        found.arrived |= 1 << notice.part
        missing = found.parts - found.arrived.bit_count()
        if missing:
            return Counted(notice.grant_id, missing, duplicate)
        self._step(found, ReaderEvent.FILLED)
        return Committed(notice.grant_id, found.grant.key, now - found.first_at)

    def _step(self, found: _Open, event: ReaderEvent) -> None:
        grant_id = found.grant.grant_id
        found.state = step(READER_TABLE, grant_id, found.state, event)
        if found.state not in READER_TERMINAL:
            return
        if self._open.pop(grant_id, None) is None:
            raise IllegalGrantEvent(grant_id, found.state.value, "a second end")
        self._counts.commits += found.state is ReaderState.COMMITTED
        self._counts.reclaimed += found.state is ReaderState.RECLAIMED
        self._ended[grant_id] = found.state
        if len(self._ended) > self._ended_max:
            self._ended.popitem(last=False)

    def _unknown(self, grant_id: str, cause: str) -> Unknown:
        self._counts.unknown[cause] = self._counts.unknown.get(cause, 0) + 1
        return Unknown(grant_id, cause)


def _misfit(found: _Open, notice: Notice) -> str:
    """Why a notice does not fit its offer; empty when it does."""
    if notice.layout_fingerprint != found.grant.layout_fingerprint:
        return REFUSED_LAYOUT
    if notice.token_count != found.grant.token_count or notice.page_counts != found.page_counts:
        return REFUSED_COUNTS
    return "" if notice.parts == found.parts else REFUSED_PARTS

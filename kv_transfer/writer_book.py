"""The writer's grants: what may be posted, what is in flight, and when a Drain can be answered. Pure.

Once a Drain was answered, nothing for that grant is in flight and nothing will start: an id that was drained before it was ever
seen is remembered and refused.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_transfer.grant_states import (
    WRITER_TABLE,
    WRITER_TERMINAL,
    DuplicateGrant,
    GrantsFull,
    IllegalGrantEvent,
    WriterEvent,
    WriterState,
    step,
)
from kv_transfer.offer import Grant, HandoverError

WRITER_GRANTS_MAX = 1024
# Ended and drained ids that are remembered. At 1,000 requests/s this is a minute: far longer than a message can be late
# (a Prefill call that arrives after its Drain travels for seconds at most).
TOMBSTONES_MAX = 65_536
# A writer that heard nothing for so long may have been cut off: it stops by itself.
WRITER_LEASE_S = 10.0

STOP_REVOKED = "revoked"
STOP_LEASE = "lease_expired"


class GrantRevoked(HandoverError):
    """The grant was drained before it came: it must never be written."""

    def __init__(self, grant_id: str) -> None:
        super().__init__(f"grant {grant_id} was taken back before this member saw it")
        self.grant_id = grant_id


@dataclass(frozen=True, slots=True)
class Writing:
    """The grant goes on."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class Filled:
    """Every part is written: the grant is committed."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The grant will not be filled; `in_flight` parts still have to end."""

    grant_id: str
    cause: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The grant ended unfilled: nothing is in flight, nothing will start. Source pages and every waiting Drain can be let go."""

    grant_id: str
    cause: str


WriterOutcome = Writing | Filled | Draining | Drained


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """Answer the Drain: the grant was committed before, or nothing is in flight and nothing will start."""

    committed: bool
    cause: str


@dataclass(frozen=True, slots=True)
class AnswerLater:
    """Parts are in flight: answer when `finished` returns Drained for this grant. Every waiting Drain then gets its answer."""

    in_flight: int


DrainAnswer = AnswerNow | AnswerLater


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """Open grants and parts in flight now, and events since the start."""

    accepted: int
    writing: int
    draining: int
    parts_in_flight: int
    tombstones: int
    accepts: int
    commits: int
    drains: int
    stops: dict[str, int]


@dataclass(slots=True)
class _Open:
    grant: Grant
    state: WriterState = WriterState.ACCEPTED
    parts: int = 0
    in_flight: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    cause: str = ""


class WriterBook:
    """All grants of one prefill member. Times are monotonic seconds."""

    def __init__(
        self,
        grants_max: int = WRITER_GRANTS_MAX,
        tombstones_max: int = TOMBSTONES_MAX,
        lease_s: float = WRITER_LEASE_S,
    ) -> None:
        self._grants_max = grants_max
        self._tombstones_max = tombstones_max
        self._lease_s = lease_s
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, tuple[WriterState, str]] = OrderedDict()
        self._heard_at: float | None = None
        self._accepts = self._commits = self._unfilled = self._drains = 0
        self._stops: dict[str, int] = {}

    def accept(self, grant: Grant, now: float) -> None:
        """Take a grant in. Raises GrantRevoked (drained before), DuplicateGrant, GrantsFull."""
        ended = self._ended.get(grant.grant_id)
        if ended is not None and ended == (WriterState.DRAINED, STOP_REVOKED):
            raise GrantRevoked(grant.grant_id)
        known = self.state(grant.grant_id)
        if known is not None:
            raise DuplicateGrant(grant.grant_id, known.value)
        if len(self._open) >= self._grants_max:
            raise GrantsFull(self._grants_max)
        if not self._open:
            self._heard_at = now  # nothing was open, so nothing could have been slept through
        self._open[grant.grant_id] = _Open(grant)
        self._accepts += 1

    def state(self, grant_id: str) -> WriterState | None:
        """Where a grant stands; None when it was never here or has been forgotten."""
        found = self._open.get(grant_id)
        if found:
            return found.state
        ended = self._ended.get(grant_id)
        return ended[0] if ended else None

    def begin(self, grant_id: str, parts: int) -> None:
        """The hand-over is planned, with so many parts (at least one)."""
        found = self._require(grant_id, WriterEvent.BEGIN.value)
        if parts < 1:
            raise IllegalGrantEvent(grant_id, found.state.value, f"{parts} parts")
        found.state = step(WRITER_TABLE, grant_id, found.state, WriterEvent.BEGIN)
        found.parts = parts

    def may_post(self, grant_id: str, now: float) -> bool:
        """Whether this writer still owns the grant. Asked again right before each post: pages may have been taken back since."""
        found = self._open.get(grant_id)
        return found is not None and found.state is WriterState.WRITING and not self._slept(now)

    def posted(self, grant_id: str, part: int) -> None:
        """A part is given to the transport. Raises IllegalGrantEvent unless the grant is WRITING and the part is new."""
        found = self._require(grant_id, "posted")
        fresh = 0 <= part < found.parts and part not in found.in_flight and part not in found.done
        if found.state is not WriterState.WRITING or not fresh:
            raise IllegalGrantEvent(grant_id, found.state.value, f"a post of part {part} of {found.parts}")
        found.in_flight.add(part)

    def finished(self, grant_id: str, part: int, cause: str | None = None) -> WriterOutcome:
        """The transport is done with a part; `cause` says why it failed, None that it was written.

        Raises IllegalGrantEvent for a part that is not in flight.
        """
        found = self._require(grant_id, "finished")
        if part not in found.in_flight:
            raise IllegalGrantEvent(grant_id, found.state.value, f"the end of part {part}, which is not in flight")
        found.in_flight.remove(part)
        if cause is not None:
            return self._stop(found, cause)
        found.done.add(part)
        if found.state is WriterState.DRAINING:
            return self._settle(found)
        if len(found.done) < found.parts:
            return Writing(grant_id)
        self._end(found, WriterEvent.ALL_SENT)
        return Filled(grant_id)

    def fail(self, grant_id: str, cause: str) -> WriterOutcome | None:
        """This member gives the grant up. None when it is not open: nothing to do."""
        found = self._open.get(grant_id)
        return self._stop(found, cause) if found else None

    def drain(self, grant_id: str) -> DrainAnswer:
        """The reader wants the grant back. Asked twice: the same answer. An unknown id is remembered and never written."""
        self._drains += 1
        found = self._open.get(grant_id)
        if found is None:
            state, cause = self._ended.get(grant_id, (WriterState.DRAINED, STOP_REVOKED))
            self._remember(grant_id, state, cause)
            return AnswerNow(state is WriterState.COMMITTED, cause)
        outcome = self._stop(found, STOP_REVOKED)
        if isinstance(outcome, Draining):
            return AnswerLater(outcome.in_flight)
        return AnswerNow(False, found.cause)

    def heard(self, now: float) -> list[WriterOutcome]:
        """The control side is alive. After a gap longer than the lease every grant that is not draining is given up: the others
        may long have acted without this member. Returns what became of them."""
        slept = self._slept(now)
        self._heard_at = now
        if not slept:
            return []
        live = [e for e in self._open.values() if e.state is not WriterState.DRAINING]
        return [self._stop(entry, STOP_LEASE) for entry in live]

    def draining(self) -> list[str]:
        """Grants that wait for parts in flight."""
        return [i for i, e in self._open.items() if e.state is WriterState.DRAINING]

    def open_ids(self) -> list[str]:
        """Every grant that has not ended."""
        return list(self._open)

    def statistics(self) -> WriterStatistics:
        """Counts; gauges are recounted from the open grants."""
        states = [e.state for e in self._open.values()]
        return WriterStatistics(
            accepted=states.count(WriterState.ACCEPTED),
            writing=states.count(WriterState.WRITING),
            draining=states.count(WriterState.DRAINING),
            parts_in_flight=sum(len(e.in_flight) for e in self._open.values()),
            tombstones=len(self._ended),
            accepts=self._accepts,
            commits=self._commits,
            drains=self._drains,
            stops=dict(self._stops),
        )

    def check(self) -> list[str]:
        """Sentences about anything that does not add up; empty when all is well."""
        faults = []
        for grant_id, entry in self._open.items():
            if entry.state in WRITER_TERMINAL or grant_id in self._ended:
                faults.append(f"grant {grant_id} is open and ended ({entry.state.value})")
            if entry.state is WriterState.DRAINING and not entry.in_flight:
                faults.append(f"grant {grant_id} is draining with nothing in flight")
            if entry.in_flight & entry.done or not _parts_of(entry.in_flight | entry.done, entry.parts):
                faults.append(f"grant {grant_id} has parts that are not parts")
        if len(self._open) > self._grants_max or len(self._ended) > self._tombstones_max:
            faults.append(f"{len(self._open)} grants and {len(self._ended)} tombstones are above their bounds")
        if self._accepts != len(self._open) + self._commits + self._unfilled:
            faults.append(
                f"{self._accepts} accepts are not {len(self._open)} open, {self._commits} committed, {self._unfilled} drained"
            )
        return faults

    def _slept(self, now: float) -> bool:
        return self._heard_at is not None and bool(self._open) and now - self._heard_at > self._lease_s

    def _require(self, grant_id: str, event: str) -> _Open:
        found = self._open.get(grant_id)
        if found is None:
            state = self.state(grant_id)
            raise IllegalGrantEvent(grant_id, state.value if state else "unknown", event)
        return found

    def _stop(self, found: _Open, cause: str) -> WriterOutcome:
        """The first cause stays: later ones are its consequences."""
        before = found.state
        found.state = step(WRITER_TABLE, found.grant.grant_id, before, WriterEvent.STOP)
        if before is not WriterState.DRAINING:
            found.cause = cause
            self._stops[cause] = self._stops.get(cause, 0) + 1
        return self._settle(found)

    def _settle(self, found: _Open) -> WriterOutcome:
        grant_id = found.grant.grant_id
        if found.in_flight:
            return Draining(grant_id, found.cause, len(found.in_flight))
        self._end(found, WriterEvent.IDLE)
        return Drained(grant_id, found.cause)

    def _end(self, found: _Open, event: WriterEvent) -> None:
        grant_id = found.grant.grant_id
        found.state = step(WRITER_TABLE, grant_id, found.state, event)
        del self._open[grant_id]
        self._commits += found.state is WriterState.COMMITTED
        self._unfilled += found.state is WriterState.DRAINED
        self._remember(grant_id, found.state, found.cause)

    def _remember(self, grant_id: str, state: WriterState, cause: str) -> None:
        self._ended[grant_id] = (state, cause)
        self._ended.move_to_end(grant_id)
        if len(self._ended) > self._tombstones_max:
            self._ended.popitem(last=False)


def _parts_of(parts: Iterable[int], count: int) -> bool:
    return all(0 <= part < count for part in parts)

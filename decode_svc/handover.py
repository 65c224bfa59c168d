"""Grants of a decode member: offering, taking back, draining, fencing. Pure: time comes in, errands go out.

A grant is reserved when a seat opens and offered when its writer's endpoint is known. A grant that is taken back keeps its
pages and its landing row until its writer answered a Drain or was fenced; a writer that stays silent is suspect, its
grants are quarantined, and after some tries it is fenced. No clock frees a page.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.memory import DecodeMemory, Holding
from decode_svc.messages import AskDrain, AskEndpoint, AskFence, DrainAnswer, Errand
from engine.pages import GrantedPage
from kv_transfer.grants import Committed, Outcome, ReaderBook, ReaderState
from kv_transfer.offer import Endpoint, Grant, GrantPages, Peer
from kv_transfer.plan import Notice
from lifecycle.record import AttemptKey

#: Writer incarnations with a receiving agent (some MB each). Beyond them the one without an open grant that was named longest
#: ago is cut off. Fewer than the receiver itself takes (nixl.WRITERS_MAX), which at its own bound spares nobody.
ENDPOINTS_MAX = 56


@dataclass(frozen=True, slots=True)
class HandoverLimits:
    """Durations in seconds.

    expires_s: without a sign of life from the writer the grant is asked back; start_s: as long as that the open seat is the
    sign of life while the job waits in prefill's queue. A silent writer is asked again after retry_s, doubled each time
    up to retry_most_s, and fenced after `tries_before_fence` silent tries.
    """

    grants_max: int = 256
    expires_s: float = 30.0
    start_s: float = 300.0
    retry_s: float = 0.25
    retry_most_s: float = 10.0
    tries_before_fence: int = 3
    reap_every_s: float = 1.0


class _Told(Enum):
    """Whether a writer can know of a grant."""

    NOT_YET = "not_yet"  # its endpoint is being made
    NEVER = "never"  # there is no endpoint
    OFFERED = "offered"


@dataclass(slots=True)
class _Entry:
    """One grant from its reservation until its pages are free or a seat's."""

    seat: int
    key: AttemptKey
    writer: Peer
    first_position: int
    tokens: int
    row: int | None
    pages: tuple[list[GrantedPage], ...]
    reserved_at: float
    told: _Told = _Told.NOT_YET
    heard: bool = False
    silent_tries: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A grant that can be announced to its seat."""

    seat: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Freed:
    """A grant whose pages are free. `lost`: it was still offered, so its seat loses its prefill by this."""

    seat: int
    grant_id: str
    pages: int
    lost: bool


@dataclass(slots=True)
class _Suspect:
    """A writer that is being cut off. `asked`: an answer of the transfer thread is awaited."""

    asked: bool
    again_at: float


@dataclass(slots=True)
class HandoverCounts:
    """Events since the start."""

    drains_asked: int = 0
    drains_silent: int = 0
    fences_asked: int = 0
    fences_proven: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


class Handovers:
    """All grants of one member. `me` and `fingerprint` go into each grant; `new_grant_id` gives 32 hex digits, never twice.

    landed: see ReaderBook.
    """

    def __init__(
        self,
        memory: DecodeMemory,
        me: Peer,
        fingerprint: str,
        limits: HandoverLimits,
        new_grant_id: Callable[[], str],
        landed: Callable[[Grant, Notice], bool] | None = None,
    ) -> None:
        self._memory = memory
        self._me = me
        self._fingerprint = fingerprint
        self._limits = limits
        self._new_grant_id = new_grant_id
        self.book = ReaderBook(grants_max=limits.grants_max, landed=landed)
        self.counts = HandoverCounts()
        self._entries: dict[str, _Entry] = {}
        self._endpoints: OrderedDict[str, Endpoint] = OrderedDict()
        self._incarnations: dict[str, str] = {}
        self._waiting: dict[str, list[str]] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._errands: list[Errand] = []
        self._reap_at = 0.0

    # opening

    @property
    def grants_max(self) -> int:
        """The bound on open grants."""
        return self._limits.grants_max

    @property
    def full(self) -> bool:
        """Whether the bound on grants that are open (also those being taken back) is met."""
        return len(self._entries) >= self._limits.grants_max

    def suspect(self, writer: str) -> bool:
        """Whether a writer incarnation is being cut off: nothing is offered to it."""
        return writer in self._suspects

    def reserve(
        self, seat: int, key: AttemptKey, holding: Holding, writer: Peer, tokens: int, now: float, *, with_row: bool = True
    ) -> tuple[str, Offer | None]:
        """Reserve the pages of `tokens` positions that the seat lacks; returns the grant's id, and the offer when the endpoint is
        known.

        with_row: whether a landing row is needed for the last logits.

        Raises NoLandingRow; the caller has asked `full` and `suspect`.
        """
        self._note_incarnation(writer, now)
        grant_id = self._new_grant_id()
        first = holding.indexed * self._memory.prefixes.page_tokens
        row, pages = self._memory.grant(holding, grant_id, tokens, with_row=with_row)
        self._entries[grant_id] = _Entry(seat, key, writer, first, tokens, row, pages, now)
        endpoint = self._endpoints.get(writer.incarnation)
        if endpoint is not None:
            self._endpoints.move_to_end(writer.incarnation)
            return grant_id, self._offer(grant_id, endpoint, now)
        waiting = self._waiting.setdefault(writer.incarnation, [])
        if not waiting:
            self._errands.append(AskEndpoint(writer.incarnation))
        waiting.append(grant_id)
        return grant_id, None

    def endpoint_made(self, writer: str, endpoint: Endpoint, now: float) -> list[Offer]:
        """The endpoint of a writer is known: what waited for it can be announced. Nothing is while it is being cut off."""
        if writer in self._suspects:
            return []
        self._endpoints[writer] = endpoint
        if len(self._endpoints) > ENDPOINTS_MAX:
            busy = {entry.writer.incarnation for entry in self._entries.values()}
            idle = next((one for one in self._endpoints if one not in busy), None)
            if idle is not None:
                self._cut_off(idle, now)
        return [self._offer(grant_id, endpoint, now) for grant_id in self._waiting.pop(writer, ())]

    def endpoint_failed(self, writer: str) -> list[int]:
        """There is no endpoint: the seats that waited for it are to be ended."""
        seats = []
        for grant_id in self._waiting.pop(writer, ()):
            self._entries[grant_id].told = _Told.NEVER
            seats.append(self._entries[grant_id].seat)
        return seats

    # filling

    def arrived(self, writer: str, notice: bytes, now: float) -> tuple[int | None, Outcome]:
        """Take one notice in; returns the seat of its grant when it is open. Never raises for what a peer sent.

        With a Committed outcome the caller commits, with a Refused one it ends the seat, which takes the grant back.
        """
        outcome = self.book.arrived(writer, notice, now)
        name = type(outcome).__name__.lower()
        self.counts.outcomes[name] = self.counts.outcomes.get(name, 0) + 1
        entry = self._entries.get(outcome.grant_id)
        if entry is None:
            return None, outcome
        entry.heard = True
        return entry.seat, outcome

    def commit(self, committed: Committed, holding: Holding) -> int | None:
        """The pages are the seat's now. Returns the landing row, if any, held until its logits are read."""
        del self._entries[committed.grant_id]
        return self._memory.commit(holding, committed.grant_id)

    # taking back

    def take_back(self, grant_id: str, drained: bool) -> int | None:
        """Take a grant back. Returns the pages that became free; None when its writer must be asked first."""
        entry = self._entries[grant_id]
        self._memory.revoke(grant_id)
        if entry.told is not _Told.OFFERED:
            # Nobody was told of it, so nobody can write.
            if entry.told is _Told.NOT_YET:
                self._waiting[entry.writer.incarnation].remove(grant_id)
            return self._free(grant_id)
        self.book.revoke(grant_id)
        if drained:
            self.book.drained(grant_id)
            return self._free(grant_id)
        self._ask(grant_id, entry, 0.0)
        return None

    def drain_answered(self, grant_id: str, answer: DrainAnswer, now: float) -> Freed | None:
        """The end of one try; returns the grant when its pages are free now. A late answer changes nothing."""
        entry = self._entries.get(grant_id)
        if entry is None or self.book.state(grant_id) is ReaderState.OFFERED:
            return None
        if answer is DrainAnswer.STOPPED:
            self.book.drained(grant_id)
            return Freed(entry.seat, grant_id, self._free(grant_id), lost=False)
        self.counts.drains_silent += 1
        entry.silent_tries += 1
        self.book.unanswered(grant_id)
        self._memory.quarantine(grant_id)
        if answer is DrainAnswer.OTHER_INCARNATION:
            # The process is gone and nobody will answer for it; what it left in a socket can still land.
            self._cut_off(entry.writer.incarnation, now)
            return None
        if entry.silent_tries >= self._limits.tries_before_fence:
            self._cut_off(entry.writer.incarnation, now)
        self._ask(grant_id, entry, min(self._limits.retry_most_s, self._limits.retry_s * 2 ** (entry.silent_tries - 1)))
        return None

    def fenced(self, writer: str, proven: bool, now: float) -> list[Freed]:
        """A writer was cut off, because it was asked for here or to make room for another. Not proven: asked again later;
        nothing is free."""
        suspect = self._suspects.get(writer)
        if not proven:
            if suspect is not None:
                suspect.asked, suspect.again_at = False, now + self._limits.retry_most_s
            return []
        self._suspects.pop(writer, None)
        self._endpoints.pop(writer, None)
        self.counts.fences_proven += 1
        freed = []
        for one in self.book.fenced(writer):
            entry = self._entries[one.grant_id]
            pages = self._free(one.grant_id)
            freed.append(Freed(entry.seat, one.grant_id, pages, lost=one.before is ReaderState.OFFERED))
        if self._waiting.get(writer):
            self._errands.append(AskEndpoint(writer))
        return freed

    # time

    def reap(self, now: float) -> list[int]:
        """Seats whose grants expired unused, and fences to ask for again. Cheap when called too early."""
        if now < self._reap_at:
            return []
        self._reap_at = now + self._limits.reap_every_s
        for writer, suspect in self._suspects.items():
            if not suspect.asked and now >= suspect.again_at:
                suspect.asked = True
                self.counts.fences_asked += 1
                self._errands.append(AskFence(writer))
        for grant_id, entry in self._entries.items():
            waits = not entry.heard and now - entry.reserved_at < self._limits.start_s
            if waits and self.book.state(grant_id) is ReaderState.OFFERED:
                self.book.renew(grant_id, now)
        return [self._entries[grant_id].seat for grant_id in self.book.expired(now)]

    def next_wake(self) -> float | None:
        """When `reap` has something to look at; None when nothing is open."""
        return self._reap_at if self._entries or self._suspects else None

    def take_errands(self) -> list[Errand]:
        """Errands since the last call."""
        errands, self._errands = self._errands, []
        return errands

    # books

    @property
    def open(self) -> int:
        """Grants whose pages are neither free nor a seat's."""
        return len(self._entries)

    @property
    def oldest_reserved_at(self) -> float | None:
        """When the oldest of them was reserved, in monotonic seconds; None without one."""
        oldest = next(iter(self._entries.values()), None)
        return None if oldest is None else oldest.reserved_at

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        faults = self.book.check()
        offered = sum(entry.told is _Told.OFFERED for entry in self._entries.values())
        statistics = self.book.statistics()
        in_book = statistics.offered + statistics.revoking + statistics.quarantined
        if offered != in_book:
            faults.append(f"grants: {offered} were offered and are open here, {in_book} in the book")
        waiting = {grant_id for ids in self._waiting.values() for grant_id in ids}
        silent = {grant_id for grant_id, entry in self._entries.items() if entry.told is _Told.NOT_YET}
        if waiting != silent:
            faults.append(f"grants: {len(silent)} are not offered yet and {len(waiting)} wait for an endpoint")
        return faults

    def _offer(self, grant_id: str, endpoint: Endpoint, now: float) -> Offer:
        entry = self._entries[grant_id]
        groups = tuple(
            GrantPages(tuple(page.page_id for page in pages), tuple(page.generation for page in pages)) for pages in entry.pages
        )
        grant = Grant(
            grant_id=grant_id,
            key=entry.key,
            decode=self._me,
            layout_fingerprint=self._fingerprint,
            first_position=entry.first_position,
            token_count=entry.tokens,
            groups=groups,
            landing_row=entry.row,
            endpoint=endpoint,
            expires_after_s=self._limits.expires_s,
        )
        self.book.offer(grant, entry.writer, now)
        entry.told = _Told.OFFERED
        return Offer(entry.seat, grant)

    def _ask(self, grant_id: str, entry: _Entry, delay_s: float) -> None:
        self.counts.drains_asked += 1
        self._errands.append(AskDrain(grant_id, entry.key, entry.writer, delay_s))

    def _cut_off(self, writer: str, now: float) -> None:
        if writer in self._suspects:
            return
        self._suspects[writer] = _Suspect(asked=True, again_at=now)
        self._endpoints.pop(writer, None)
        self.counts.fences_asked += 1
        self._errands.append(AskFence(writer))

    def _note_incarnation(self, writer: Peer, now: float) -> None:
        """A member that was started again: the agent of its earlier incarnation is of no more use."""
        before = self._incarnations.get(writer.member)
        if before != writer.incarnation:
            self._incarnations[writer.member] = writer.incarnation
            if before is not None:
                self._retire(before, now)
            if len(self._incarnations) > 4 * ENDPOINTS_MAX:
                del self._incarnations[next(iter(self._incarnations))]

    def _retire(self, writer: str, now: float) -> None:
        """Cut off a writer that is not needed, unless grants of it are open: those have their own way to a fence."""
        if writer in self._endpoints and not any(e.writer.incarnation == writer for e in self._entries.values()):
            self._cut_off(writer, now)

    def _free(self, grant_id: str) -> int:
        del self._entries[grant_id]
        return self._memory.reclaim(grant_id)

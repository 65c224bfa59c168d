"""Who may run next: the waiting queue, this router's tickets and the placement, brought together.

Nothing here waits for anyone: whenever something changed (a request came, a ticket went back, a member sent news) the queue
is looked through once, and who fits gets a ticket. The store's word is asked by the route, after it.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from lifecycle.record import AttemptKey
from router.budget import BudgetBook, Claim, Demand, Limits, Scope, Seats, Ticket, claims, estimate
from router.member_link import Member, Role
from router.members import Members
from router.placement import DecodeView, Need, Placement, PrefillView, choose
from router.queue import Fit, QueueLimits, Waiting, WaitingQueue
from router.request import ValidatedRequest
from router.stop import Stop


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Bounds of waiting and of what may be held. `exclude_s`: how long a request avoids a member that refused it."""

    queue: QueueLimits
    budgets: Limits
    exclude_s: float = 0.25


@dataclass(eq=False, slots=True)
class Admitted:
    """A ticket with the members it is for. `seated_at` and `accepted_at` are monotonic times, 0 before."""

    ticket: Ticket
    placement: Placement
    decode: Member
    prefill: Member | None
    demand: Demand
    seated_at: float = 0.0
    accepted_at: float = 0.0

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the ticket holds."""
        return self.ticket.claims


@dataclass(eq=False, slots=True)
class Place:
    """A request's place in the queue, and its ticket when it has one."""

    waiting: Waiting
    prompt_tokens: int
    max_output_tokens: int
    key: AttemptKey
    future: "asyncio.Future[Admitted]"
    admitted: Admitted | None = None
    #: Members that this request avoids, until a monotonic time.
    excluded: dict[str, float] = field(default_factory=dict)
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pools:
    """What one look through the queue goes by."""

    decode: list[DecodeView]
    prefill: list[PrefillView]
    page_tokens: int
    now: float


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A ticket that could be given."""

    placement: Placement
    claims: tuple[Claim, ...]
    demand: Demand


class Admission:
    """The waiting requests and the tickets of one router."""

    def __init__(self, members: Members, settings: AdmissionSettings, rng: random.Random) -> None:
        self._members = members
        self._settings = settings
        self._rng = rng
        self._places: dict[str, Place] = {}
        self._admitted: set[Admitted] = set()
        self.queue = WaitingQueue(settings.queue)
        self.book = BudgetBook()

    @contextmanager
    def enter(self, request: ValidatedRequest, arrived_at: float) -> Iterator[Place]:
        """A place in the queue, left at the end whatever happens. Raises QueueFull."""
        waiting = Waiting(request.request_id, request.tenant, request.priority, request.prompt_tokens, arrived_at)
        self.queue.put(waiting)
        key = AttemptKey(request.request_id, 1)
        place = Place(waiting, request.prompt_tokens, request.max_output_tokens, key, self._future())
        self._places[request.request_id] = place
        self.look()
        try:
            yield place
        finally:
            del self._places[request.request_id]
            self.queue.remove(request.request_id)
            self._release(place)

    @asynccontextmanager
    async def ticket(self, place: Place, stop: Stop) -> AsyncIterator[Admitted]:
        """Waits for a ticket; inside it is held. Raises Stopped when the request has to end first."""
        admitted = await stop.until(place.future)
        try:
            yield admitted
        finally:
            self._release(place)

    def again(self, place: Place, key: AttemptKey, *, avoid: tuple[str, ...] = (), wait_s: float = 0.0) -> None:
        """Back to the queue for attempt `key`, age kept; members to `avoid` are left out for a moment."""
        self._release(place)
        now = time.monotonic()
        place.key, place.future, place.not_before = key, self._future(), now + wait_s
        place.excluded = {name: until for name, until in place.excluded.items() if until > now}
        place.excluded.update(dict.fromkeys(avoid, now + self._settings.exclude_s))
        self.queue.requeue(place.waiting)
        self.look()
        for delay_s in {wait_s, self._settings.exclude_s if avoid else 0.0} - {0.0}:
            asyncio.get_running_loop().call_later(delay_s, self.look)

    def seated(self, admitted: Admitted) -> None:
        """The decode member has given the seat: its next news will count it."""
        admitted.seated_at = time.monotonic()

    def accepted(self, admitted: Admitted) -> None:
        """The prefill member has the prompt in its queue: its next news will count it."""
        admitted.accepted_at = time.monotonic()

    def committed(self, place: Place) -> None:
        """The hand-over is complete: prompt tokens go back, pages stay."""
        admitted = place.admitted
        if admitted is not None:
            self.book.release_tokens(admitted.ticket)
            self.look()

    def has_members(self) -> bool:
        """Whether the pools have members that take work, busy or not."""
        prefill = self._members.taking(Role.PREFILL)
        return any(prefill or one.info.computes_prompts for one in self._members.taking(Role.DECODE))

    def look(self) -> None:
        """Give tickets to all that fit now."""
        while len(self.queue) and (pools := self._pools()) is not None:
            fitting: list[_Fitting] = []
            taken = self.queue.take(partial(self._fits, pools, fitting))
            if taken is None:
                return
            self._admit(taken, fitting[-1])

    def tickets(self) -> int:
        """Tickets held now."""
        return len(self._admitted)

    def check(self) -> list[str]:
        """Sentences about books that do not balance."""
        faults = [*self.queue.check(), *self.book.check()]
        held = {id(place.admitted) for place in self._places.values() if place.admitted is not None}
        if held != {id(admitted) for admitted in self._admitted}:
            faults.append(f"{len(self._admitted)} tickets are held, {len(held)} belong to requests")
        return faults

    def _fits(self, pools: _Pools, fitting: list[_Fitting], waiting: Waiting) -> Fit:
        """Whether a waiting request can run now; its ticket is then put into `fitting`."""
        place = self._places[waiting.request_id]
        if pools.now < place.not_before:
            return Fit.NO
        demand = estimate(place.prompt_tokens, place.max_output_tokens, pools.page_tokens)
        avoid = frozenset(name for name, until in place.excluded.items() if until > pools.now)
        need = Need(place.prompt_tokens, demand.pages, avoid)
        placement = choose(need, pools.decode, pools.prefill, self._rng).placement
        if placement is None:
            return Fit.NO
        wanted = claims(demand, self._seats(waiting.tenant, placement), self._settings.budgets)
        short = self.book.shortage(wanted)
        if short is not None:
            return Fit.TENANT_SHORT if short.budget.scope is Scope.TENANT else Fit.NO
        fitting.append(_Fitting(placement, wanted, demand))
        return Fit.YES

    def _admit(self, taken: Waiting, fitting: _Fitting) -> None:
        placement = fitting.placement
        place = self._places[taken.request_id]
        place.waiting = taken
        prefill = self._named(Role.PREFILL, placement.prefill_member) if placement.prefill_member else None
        decode = self._named(Role.DECODE, placement.decode_member)
        admitted = Admitted(self.book.acquire(place.key, fitting.claims), placement, decode, prefill, fitting.demand)
        self._admitted.add(admitted)
        place.admitted = admitted
        if place.future.done():  # stopped in this very moment; its context gives the ticket back
            return
        place.future.set_result(admitted)

    def _release(self, place: Place) -> None:
        admitted, place.admitted = place.admitted, None
        if admitted is not None:
            self._admitted.discard(admitted)
            self.book.release(admitted.ticket)
            self.look()

    def _named(self, role: Role, name: str) -> Member:
        return next(one for one in self._members.usable(role) if one.name == name)

    def _seats(self, tenant: str, placement: Placement) -> Seats:
        decode = self._named(Role.DECODE, placement.decode_member)
        prefill = self._named(Role.PREFILL, placement.prefill_member) if placement.prefill_member else None
        return Seats(
            tenant=tenant,
            decode_member=placement.decode_member,
            decode_pages=decode.info.total_pages,
            prefill_member=placement.prefill_member,
            prefill_tokens=prefill.info.max_queued_tokens if prefill else 0,
        )

    def _pools(self) -> _Pools | None:
        """The pools as they were at the last news, and what this router has sent there since; None without a decode pool."""
        decode = [self._decode_view(one) for one in self._members.usable(Role.DECODE)]
        prefill = [self._prefill_view(one) for one in self._members.usable(Role.PREFILL)]
        return _Pools(decode, prefill, self._members.capacity().page_tokens, time.monotonic()) if decode else None

    def _decode_view(self, member: Member) -> DecodeView:
        unseen = [one for one in self._admitted if one.decode is member and not 0.0 < one.seated_at <= member.seen_at]
        info, load = member.info, member.load
        return DecodeView(
            member=member.name,
            total_pages=info.total_pages,
            free_pages=load.free_pages,
            max_sequences=info.max_sequences,
            running_sequences=load.running_sequences,
            waiting_sequences=load.waiting_sequences,
            waiting_tokens=load.waiting_tokens,
            decode_step_s=_finite(load.decode_step_s),
            prefill_tokens_per_s=_finite(load.prefill_tokens_per_s),
            computes_prompts=info.computes_prompts,
            draining=load.draining,
            stale=self._members.stale(member),
            inflight_pages=sum(one.demand.pages for one in unseen),
            inflight_sequences=len(unseen),
            inflight_tokens=sum(one.demand.prefill_tokens for one in unseen if one.prefill is None),
        )

    def _prefill_view(self, member: Member) -> PrefillView:
        unseen = [one for one in self._admitted if one.prefill is member and not 0.0 < one.accepted_at <= member.seen_at]
        return PrefillView(
            member=member.name,
            max_queued_tokens=member.info.max_queued_tokens,
            waiting_tokens=member.load.waiting_tokens,
            prefill_tokens_per_s=_finite(member.load.prefill_tokens_per_s),
            draining=member.load.draining,
            stale=self._members.stale(member),
            inflight_tokens=sum(one.demand.prefill_tokens for one in unseen),
        )

    @staticmethod
    def _future() -> "asyncio.Future[Admitted]":
        return asyncio.get_running_loop().create_future()


def _finite(value: float) -> float:
    """A member's measurement, 0 (not measured) when it is no sensible number."""
    return value if math.isfinite(value) and value > 0 else 0.0

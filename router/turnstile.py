"""Who may run next: the waiting queue, this router's tickets and the placement, brought together. Pure: time comes in.

Whenever something changed (a request came, a ticket went back, a member told news) `look` goes through the queue once and
says who got a ticket. What it costs depends on the members that changed, never on how many requests wait or run.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic

from lifecycle.adapters import Adapter
from lifecycle.record import AttemptKey
from router.budget import BudgetBook, Claim, Demand, Limits, LimitsOf, Scope, Seats, Ticket, claims, estimate
from router.member_facts import M, Role
from router.nearness import FAR, Hints, Near, PromptPrefix, nearness
from router.pace import Pace
from router.placement import Choice, DecodeView, Dice, LocalLimits, Need, Placement, PrefillView, choose
from router.pool_views import Pools, PoolViews
from router.queue import Fit, QueueFull, QueueLimits, Waiting, WaitingQueue, WaitTooLong
from router.refused import Refused, told_s
from router.unseen import Sent, Unseen

#: Chooses the members of an attempt: `router.placement.choose`, or what it is compared with.
Chooser = Callable[[Need, Sequence[DecodeView], Sequence[PrefillView], Dice], Choice]


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Bounds of waiting and of what may be held. `budgets`: for tenants that have none of their own. `queue_share`: of its queue
    clock that a request may have to wait to be let in: a long queue serves no more than a short one, and the wait is an estimate.
    `exclude_s`: how long one avoids a member that refused it. `local`: when a decode member computes the rest of a prompt that it
    has most of."""

    queue: QueueLimits
    budgets: Limits
    queue_share: float = 0.33
    exclude_s: float = 0.25
    local: LocalLimits = field(default_factory=LocalLimits)


@dataclass(eq=False, slots=True)
class Admitted(Generic[M]):
    """A ticket with the members it is for. `most_computed_tokens`: bound for what decode is to compute of the prompt, where that
    was chosen by a hint; None: no bound."""

    ticket: Ticket
    placement: Placement
    decode: M
    prefill: M | None
    demand: Demand
    moved: bool
    most_computed_tokens: int | None = None

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the ticket holds."""
        return self.ticket.claims


@dataclass(eq=False, slots=True)
class Place(Generic[M]):
    """A request's place in the queue, and its ticket when it has one. Times are monotonic seconds."""

    waiting: Waiting
    prompt_tokens: int
    max_output_tokens: int
    key: AttemptKey
    admitted: Admitted[M] | None = None
    #: Tokens that earlier attempts chose; the next one computes them with the prompt.
    chosen_tokens: int = 0
    #: The KV is to be moved from another decode member.
    moved: bool = False
    #: The decode member computes the prompt, whoever else could.
    alone: bool = False
    #: Members that this request avoids, until a monotonic time.
    excluded: dict[str, float] = field(default_factory=dict)
    not_before: float = 0.0
    prefix: PromptPrefix = field(default_factory=PromptPrefix)
    #: Outputs of the prompt that are still to be made. With several, `chosen_tokens` is 0: they have the prompt alone in common.
    outputs: int = 1
    #: What computes it; None: the base model.
    adapter: Adapter | None = None
    #: The client says that it was refused before, by whichever router.
    returned: bool = False

    @property
    def request_id(self) -> str:
        """Whose it is."""
        return self.waiting.request_id


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A ticket that could be given."""

    placement: Placement
    claims: tuple[Claim, ...]
    demand: Demand
    most_computed_tokens: int | None


class Turnstile(Generic[M]):
    """The waiting requests and the tickets of one router."""

    def __init__(
        self,
        pools: Pools[M],
        settings: AdmissionSettings,
        rng: Dice,
        chooser: Chooser = choose,
        hints: Hints[M] | None = None,
        budgets: LimitsOf | None = None,
    ) -> None:
        self._settings = settings
        self._budgets = budgets or (lambda tenant: settings.budgets)
        self._hints = hints
        self._rng = rng
        self._choose = chooser
        self._views = PoolViews(pools)
        self._places: dict[str, Place[M]] = {}
        self._admitted: set[Admitted[M]] = set()
        self._pace = Pace()
        self._refused = Refused()
        self.queue = WaitingQueue(settings.queue)
        self.book = BudgetBook()
        #: Prompt tokens whose KV came to be where it was wanted, since the start. A prompt that is computed again counts again.
        self.ready_tokens = 0

    # a request's way

    def enter(self, place: Place[M]) -> None:
        """A request comes, or comes back. Raises QueueFull."""
        waiting, now = place.waiting, place.waiting.arrived_at
        before = self._refused.take(waiting, now)
        try:
            self.queue.put(waiting, again=before or place.returned)
        except QueueFull as full:
            full.after_s = self._put_off(waiting, self.queue.waiting_tokens, now)
            raise
        self._pace.stands(waiting.arrived_at)
        self._places[place.request_id] = place

    def not_in_vain(self, place: Place[M], queue_s: float | None, now: float) -> None:
        """Raises WaitTooLong, and takes the request out again, when one that came a moment ago would wait for too much of its
        queue clock of `queue_s` seconds."""
        if place.admitted is not None or queue_s is None:
            return
        ahead = self.queue.ahead(place.waiting)
        wait_s = self._pace.wait_s(ahead, now)
        left_s = max(0.0, place.waiting.arrived_at + queue_s - now)
        if wait_s is not None and wait_s > left_s * self._settings.queue_share:
            after_s = self._put_off(place.waiting, ahead, now)
            self.queue.refuse(place.request_id)
            self.leave(place, now)
            raise WaitTooLong(wait_s, left_s, after_s)

    def enter_seated(self, place: Place[M], decode: M, placement: Placement, held: Sequence[Claim], now: float) -> None:
        """A request comes that has its seat already; it gets the ticket for what it holds, whatever the limits are."""
        info = decode.info
        prompt, most, outputs = place.prompt_tokens, place.max_output_tokens, place.outputs
        tokens = estimate(prompt, most, info.page_tokens, sequence_pages=info.sequence_pages, outputs=outputs)
        ticket = self.book.acquire(place.key, tuple(replace(claim, limit=sys.maxsize) for claim in held))
        self._places[place.request_id] = place
        self._hold(place, Admitted(ticket, placement, decode, None, tokens, moved=False), now)

    def leave(self, place: Place[M], now: float) -> None:
        """A request is over, whatever it waited for or held."""
        del self._places[place.request_id]
        self.queue.remove(place.request_id)
        if not len(self.queue):
            self._pace.empty(now)
        self.release(place, now)

    def again(self, place: Place[M], avoid: Sequence[str], now: float, wait_s: float = 0.0) -> None:
        """Back to the queue, age kept; members to `avoid` are left out for a moment."""
        self.release(place, now)
        self._pace.stands(now)
        place.not_before = now + wait_s
        place.excluded = {name: until for name, until in place.excluded.items() if until > now}
        place.excluded.update(dict.fromkeys(avoid, now + self._settings.exclude_s))
        self.queue.requeue(place.waiting)

    def release(self, place: Place[M], now: float) -> None:
        """The ticket goes back, if there is one."""
        admitted, place.admitted = place.admitted, None
        if admitted is None:
            return
        self._admitted.discard(admitted)
        self.book.release(admitted.ticket)
        for shelf, member in ((self._views.decode, admitted.decode), (self._views.prefill, admitted.prefill)):
            if member is not None and member in shelf.sent:
                shelf.sent[member].discard(admitted)
        self._views.sent(admitted.decode, admitted.prefill, now)

    def seated(self, admitted: Admitted[M], now: float) -> None:
        """The decode member has given the seat: its next news will count it."""
        self._taken(self._views.decode.sent, admitted.decode, admitted, now)

    def accepted(self, admitted: Admitted[M], now: float) -> None:
        """The prefill member has the prompt in its queue: its next news will count it."""
        if admitted.prefill is not None:
            self._taken(self._views.prefill.sent, admitted.prefill, admitted, now)

    def committed(self, place: Place[M], now: float) -> None:
        """The hand-over is complete: prompt tokens go back, pages stay."""
        admitted = place.admitted
        if admitted is None:
            return
        if not admitted.moved:
            self.ready_tokens += place.prompt_tokens
            self._pace.ready(place.prompt_tokens, now)
        self.book.release_tokens(admitted.ticket)
        if admitted.prefill is not None and admitted.prefill in self._views.prefill.sent:
            self._views.prefill.sent[admitted.prefill].discard(admitted)
            self._views.sent(admitted.decode, admitted.prefill, now)

    def refute(self, place: Place[M], decode: M) -> None:
        """The decode member had not what it was thought to have of this prompt."""
        place.prefix.refuted = True
        if self._hints is not None:
            self._hints[Role.DECODE].refute(decode, place.prefix.keys(self._views.prefix_keys))

    def could_move(self, place: Place[M], chosen_tokens: int, now: float) -> bool:
        """Whether another decode member than the one that drains has room for a running request now."""
        if not self._views.refresh(now):
            return False
        left = max(1, place.max_output_tokens - chosen_tokens)
        views = self._views
        demand = estimate(place.prompt_tokens + chosen_tokens, left, views.page_tokens, sequence_pages=views.sequence_pages)
        need = Need(0, demand.pages, moved=True, adapter=place.adapter)
        return self._choose(need, self._views.decode.views, (), self._rng).placement is not None

    def look(self, now: float) -> Iterator[Place[M]]:
        """Give tickets to all that fit now, one after the other; to be iterated to its end."""
        while len(self.queue) and self._views.refresh(now):
            fitting: list[_Fitting] = []
            taken = self.queue.take(partial(self._fits, fitting, now))
            if taken is None:
                return
            yield self._admit(taken, fitting[-1], now)
        if not len(self.queue):
            self._pace.empty(now)

    # reading

    @property
    def tickets(self) -> int:
        """Tickets held now."""
        return len(self._admitted)

    def check(self) -> list[str]:
        """Sentences about books that do not balance."""
        faults = [*self.queue.check(), *self.book.check()]
        held = {id(place.admitted) for place in self._places.values() if place.admitted is not None}
        if held != {id(admitted) for admitted in self._admitted}:
            faults.append(f"{len(self._admitted)} tickets are held, {len(held)} belong to requests")
        for shelf in (self._views.decode, self._views.prefill):
            lost = [key for sent in shelf.sent.values() for key in sent if key not in self._admitted]
            if lost:
                faults.append(f"{len(lost)} attempts count as sent to {shelf.role.value} members and hold no ticket")
        return faults

    # inside

    def _put_off(self, waiting: Waiting, ahead: int, now: float) -> float:
        """Seconds after which one that is refused is told to come back: when what waits in front of it, and what was put off
        before it, is gone."""
        after_s = told_s(self._pace.wait_s(ahead + self._refused.tokens(now), now))
        self._refused.add(waiting, after_s, now)
        return after_s

    def _fits(self, fitting: list[_Fitting], now: float, waiting: Waiting) -> Fit:
        """Whether a waiting request can run now; its ticket is then put into `fitting`."""
        place, views = self._places[waiting.request_id], self._views
        if now < place.not_before:
            return Fit.NO
        if place.adapter is not None and place.adapter not in views.adapters:
            return Fit.ABSENT
        chosen, expected = place.chosen_tokens, views.expected_output_tokens
        demand = estimate(
            place.prompt_tokens + chosen,
            max(1, place.max_output_tokens - chosen),
            views.page_tokens,
            expected_output_tokens=max(1, expected - chosen) if expected else 0,
            sequence_pages=views.sequence_pages,
            outputs=place.outputs,
        )
        if place.moved:
            demand = Demand(prefill_tokens=0, pages=demand.pages)
        avoid = frozenset(name for name, until in place.excluded.items() if until > now)
        near, local = self._near(place), self._local(place)
        need = Need(
            demand.prefill_tokens, demand.pages, avoid, place.moved, place.alone, near, local, place.outputs, place.adapter
        )
        if not views.room.could_fit(need):
            return Fit.NO
        choice = self._choose(need, views.decode.views, views.prefill.views, self._rng)
        placement = choice.placement
        if placement is None:
            views.look_for_room()
            return Fit.NO
        wanted = claims(demand, self._seats(waiting.tenant, placement), self._budgets(waiting.tenant))
        short = self.book.shortage(wanted)
        if short is not None:
            return Fit.TENANT_SHORT if short.budget.scope is Scope.TENANT else Fit.NO
        most = need.local.tokens if choice.computed_tokens is not None else None
        if choice.computed_tokens is not None:
            demand = Demand(choice.computed_tokens, demand.pages)
        fitting.append(_Fitting(placement, wanted, demand, most))
        return Fit.YES

    def _near(self, place: Place[M]) -> Near:
        """Which members are thought to have most of a prompt."""
        views, hints = self._views, self._hints
        keys = place.prefix.keys(views.prefix_keys) if hints is not None else ()
        if hints is None or not keys or place.moved or place.alone:
            return FAR
        decode, prefill, size = views.decode, views.prefill, views.page_tokens
        return Near(
            nearness(hints[Role.DECODE], keys, size, decode.members, decode.place_of),
            nearness(hints[Role.PREFILL], keys, size, prefill.members, prefill.place_of),
        )

    def _local(self, place: Place[M]) -> LocalLimits:
        return LocalLimits() if place.moved or place.alone or place.prefix.refuted else self._settings.local

    def _seats(self, tenant: str, placement: Placement) -> Seats:
        decode = self._views.decode.members[placement.decode_member]
        prefill = self._views.prefill.members.get(placement.prefill_member)
        return Seats(
            tenant=tenant,
            decode_member=placement.decode_member,
            decode_pages=decode.info.total_pages,
            prefill_member=placement.prefill_member,
            prefill_tokens=prefill.info.max_queued_tokens if prefill else 0,
        )

    def _admit(self, taken: Waiting, fitting: _Fitting, now: float) -> Place[M]:
        place, placement = self._places[taken.request_id], fitting.placement
        place.waiting = taken
        decode = self._views.decode.members[placement.decode_member]
        prefill = self._views.prefill.members[placement.prefill_member] if placement.prefill_member else None
        ticket = self.book.acquire(place.key, fitting.claims)
        most = fitting.most_computed_tokens
        self._hold(place, Admitted(ticket, placement, decode, prefill, fitting.demand, place.moved, most), now)
        return place

    def _hold(self, place: Place[M], admitted: Admitted[M], now: float) -> None:
        place.admitted = admitted
        self._admitted.add(admitted)
        demand, prefill = admitted.demand, admitted.prefill
        here = Sent(demand.pages, demand.prefill_tokens if prefill is None else 0, place.outputs)
        self._views.decode.unseen(admitted.decode).add(admitted, here)
        if prefill is not None:
            self._views.prefill.unseen(prefill).add(admitted, Sent(tokens=demand.prefill_tokens))
        self._views.sent(admitted.decode, prefill, now)

    @staticmethod
    def _taken(shelf: dict[M, Unseen], member: M, admitted: Admitted[M], now: float) -> None:
        sent = shelf.get(member)
        if sent is not None:
            sent.taken(admitted, now)

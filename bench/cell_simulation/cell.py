"""The simulated cell: routers with their turnstiles, the store's budgets, two pools of members, and the messages between them."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.cell_simulation.decode_member import DecodeMember
from bench.cell_simulation.events import Events
from bench.cell_simulation.figures import Gaps, Request, Result, result
from bench.cell_simulation.known import Known
from bench.cell_simulation.output import EOS, TOKEN
from bench.cell_simulation.placing import RoundRobin
from bench.cell_simulation.prefill_member import PrefillMember
from bench.cell_simulation.settings import CellSettings, Policy
from bench.cell_simulation.trace import Arrival
from decode_svc.messages import LosePrefill, OpenSeat, OutputMade, PromptReady, SeatEnded, SeatEvent, SeatGranted, SeatRefused
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceSpec, StopSpec
from lifecycle.deadlines import Limits
from lifecycle.finish import COMPLETE, Cause
from lifecycle.record import AttemptKey
from prefill_svc import messages as m
from router import endings
from router.budget import BudgetBook, Ticket
from router.budget import Limits as BudgetLimits
from router.member_facts import Role
from router.placement import choose
from router.queue import QueueFull, Waiting, WaitTooLong
from router.turnstile import AdmissionSettings, Admitted, Place, Turnstile
from rpc.status import StatusError
from text.detokeniser import Utf8Policy

#: How long a request waits that the store found short, as in router.attempt: once to twice that.
SHORT_S = 0.05
STALE_AFTER_S = 3.0
#: Failure of a request that was refused as soon as it came, the last time that its client tried.
REFUSED = "refused"
#: How long after the last arrival a run goes on at most, in seconds.
REST_S = 240.0
_STOP = StopSpec(eos_ids=frozenset({EOS}))
_GREEDY = SamplingParams(temperature=0.0)


class CellPools:
    """The members that take work, as router.pool_views.Pools."""

    def __init__(self, prefill: Sequence[PrefillMember], decode: Sequence[DecodeMember]) -> None:
        self._members = {Role.PREFILL: [one.known for one in prefill], Role.DECODE: [one.known for one in decode]}

    def usable(self, role: Role) -> Sequence[Known]:
        """Members of a pool that new work can go to."""
        return self._members[role]

    def add(self, known: Known) -> None:
        """One more takes work."""
        self._members[known.info.role].append(known)

    def remove(self, known: Known) -> None:
        """One takes no more work."""
        self._members[known.info.role].remove(known)

    def stale_at(self, member: Known) -> float:
        """As router.members.Members; a member that has nothing to tell repeats itself each second."""
        return member.seen_at + 1e9


@dataclass(eq=False, slots=True)
class Attempt:
    """One try at one request."""

    seat: int
    router: "Router"
    place: Place[Known]
    admitted: Admitted[Known]
    request: Request
    decode: DecodeMember
    prefill: PrefillMember | None
    ticket: Ticket


class Router:
    """One router: the real turnstile, and what its routes would do."""

    def __init__(self, number: int, cell: "Cell", pools: CellPools) -> None:
        settings = cell.settings
        placing = partial(choose, compared=settings.compared)
        chooser = RoundRobin() if settings.policy is Policy.ROUND_ROBIN else placing
        self._settings = AdmissionSettings(settings.queue, BudgetLimits(), settings.queue_share)
        self.turnstile: Turnstile[Known] = Turnstile(pools, self._settings, random.Random(settings.seed + number), chooser)
        self._cell = cell
        self._requests: dict[str, Request] = {}

    def arrive(self, request: Request) -> None:
        """A client's request."""
        cell = self._cell
        waiting = Waiting(request.request_id, "tenant", 0, request.prompt_tokens, cell.events.now)
        most = min(cell.settings.max_output_tokens, cell.settings.service.model.context_tokens - request.prompt_tokens)
        place = Place[Known](waiting, request.prompt_tokens, most, AttemptKey(request.request_id, 1))
        try:
            self.turnstile.enter(place)
        except QueueFull as full:
            cell.refusals[full.limit] = cell.refusals.get(full.limit, 0) + 1
            self._told(request, endings.queue_full(full, waiting.tenant))
            return
        self._requests[request.request_id] = request
        self.look()
        try:
            self.turnstile.not_in_vain(
                place, cell.settings.queue_clock_s if cell.settings.refuses_waits else None, cell.events.now
            )
        except WaitTooLong as long:
            del self._requests[request.request_id]
            self._told(request, endings.wait_too_long(long))
            return
        cell.events.after(cell.settings.queue_clock_s, self._queue_clock, place)

    def _told(self, request: Request, refusal: StatusError) -> None:
        """A refused client comes back when it was told to, unless that is longer than it wants to wait in all."""
        cell, after_s = self._cell, refusal.details.retry_after_s
        if after_s is None or cell.events.now + after_s > request.arrived_at + cell.settings.patience_s:
            request.failure = REFUSED
            return
        cell.away += 1
        cell.events.after(after_s, self._come_back, request)

    def _come_back(self, request: Request) -> None:
        self._cell.away -= 1
        request.tries += 1
        request.came_at = self._cell.events.now
        self.arrive(request)

    def look(self) -> None:
        """Everything that got a ticket asks the store, then for its seat."""
        cell = self._cell
        if not len(self.turnstile.queue):
            return
        for place in self.turnstile.look(cell.events.now):
            cell.events.after(cell.settings.hop_s, self._reserve, place, place.admitted)

    def again(self, place: Place[Known], avoid: Sequence[str], wait_s: float = 0.0) -> None:
        """Back to the queue."""
        cell = self._cell
        request = self._requests[place.request_id]
        request.attempts += 1
        place.key = AttemptKey(place.request_id, request.attempts)
        self.turnstile.again(place, avoid, cell.events.now, wait_s)
        self.look()
        if delay_s := max(wait_s, self._settings.exclude_s if avoid else 0.0):
            cell.events.after(delay_s, self.look)

    def leave(self, place: Place[Known]) -> None:
        """The request is over."""
        del self._requests[place.request_id]
        self.turnstile.leave(place, self._cell.events.now)
        self.look()

    def _queue_clock(self, place: Place[Known]) -> None:
        request = self._requests.get(place.request_id)
        if request is not None and place.admitted is None and request.attempts == 1:
            request.failure = "queue clock"
            self.leave(place)

    def _reserve(self, place: Place[Known], admitted: Admitted[Known]) -> None:
        """What the store's script does: all claims or none, over all routers."""
        if self._cell.store.shortage(admitted.claims) is not None:
            wait_s = SHORT_S * self._cell.rng.uniform(1.0, 2.0)
            self.again(place, (), wait_s)
            self._requests[place.request_id].attempts -= 1
            self._cell.short += 1
            return
        ticket = self._cell.store.acquire(place.key, admitted.claims)
        self._cell.open(self, place, admitted, self._requests[place.request_id], ticket)


class Cell:
    """Everything of one run."""

    def __init__(self, settings: CellSettings, arrivals: Iterable[Arrival]) -> None:
        self.settings = settings
        self.lengths: dict[str, int] = {}
        self.events = Events()
        self.rng = random.Random(settings.seed)
        self.store = BudgetBook()
        self.short = 0
        self.refusals: dict[str, int] = {}
        #: Clients that were refused and will come back.
        self.away = 0
        #: Which router hears the next news first.
        self._first = 0
        self.gaps = Gaps()
        self.requests: list[Request] = []
        sizes = _sizes(settings)
        self.prefill = [self._prefill_member(number) for number in range(sizes[0])]
        self.decode = [self._decode_member(number) for number in range(sizes[1])]
        self.pools = CellPools(self.prefill, self.decode)
        self.routers = [Router(number, self, self.pools) for number in range(settings.routers)]
        self._prefill = {one.peer.member: one for one in self.prefill}
        self._decode = {one.peer.member: one for one in self.decode}
        self.attempts: dict[int, Attempt] = {}
        self._grants: dict[str, Attempt] = {}
        self._seats = itertools.count(1)
        for member in (*self.prefill, *self.decode):
            member.news.heard = self._look
        self._arrive(arrivals)

    def run(self) -> Result:
        """To the end of the last answer, or REST_S after the last arrival."""
        span = self.requests[-1].arrived_at
        self.events.run(span)
        busy = [[one.busy_s / span for one in pool] for pool in (self.prefill, self.decode)]
        until = span
        while (self.attempts or self.away) and until < span + REST_S:
            until += 1.0
            self.events.run(until)
        shares = [sum(pool) / len(pool) if pool else 0.0 for pool in busy]
        return result(self.requests, self.gaps, self.settings.targets, *shares)

    def check(self) -> list[str]:
        """Sentences about what does not balance."""
        faults = [fault for router in self.routers for fault in router.turnstile.check()]
        faults += [fault for member in (*self.prefill, *self.decode) for fault in member.scheduler.check()]
        held = self.store.statistics().open_tickets
        if held != len(self.attempts):
            faults.append(f"{held} tickets are held at the store by {len(self.attempts)} attempts")
        return faults + self.store.check()

    def open(self, router: Router, place: Place[Known], admitted: Admitted[Known], request: Request, ticket: Ticket) -> None:
        """Ask a decode member for a seat."""
        decode = self._decode[admitted.placement.decode_member]
        prefill = self._prefill.get(admitted.placement.prefill_member)
        attempt = Attempt(next(self._seats), router, place, admitted, request, decode, prefill, ticket)
        self.attempts[attempt.seat] = attempt
        spec = SequenceSpec(
            key=place.key,
            index=0,
            prompt_token_ids=(TOKEN,) * request.prompt_tokens,
            sampling=_GREEDY,
            stop=_STOP,
            max_output_tokens=place.max_output_tokens,
            context_tokens=self.settings.service.model.context_tokens,
            utf8_policy=Utf8Policy.DROP,
        )
        peer = prefill.peer if prefill is not None else None
        command = OpenSeat(attempt.seat, spec, Limits(), 0, False, peer, self.events.now)
        self.events.after(self.settings.hop_s, decode.send, command)

    def _prefill_member(self, number: int) -> PrefillMember:
        return PrefillMember(number, self.settings, self.events, self._prefill_said)

    def _decode_member(self, number: int) -> DecodeMember:
        return DecodeMember(number, self.settings, self.events, self.lengths, self._decode_said)

    # what members say

    def _decode_said(self, event: SeatEvent) -> None:
        attempt = self.attempts[event.seat]
        if isinstance(event, OutputMade):
            self._token(attempt.request, len(event.selected))
        elif isinstance(event, SeatGranted | SeatRefused | PromptReady | SeatEnded):
            self.events.after(self.settings.hop_s, _HEARD[type(event)], self, attempt, event)

    def _prefill_said(self, output: m.Output) -> None:
        if isinstance(output, m.Accepted):
            self.events.after(self.settings.hop_s, self._accepted, self._grants[output.grant_id])
        elif isinstance(output, m.Failed):
            self.events.after(self.settings.hop_s, self._prefill_failed, self._grants.pop(output.grant_id))
        elif isinstance(output, m.Committed):
            del self._grants[output.grant_id]

    def _token(self, request: Request, count: int) -> None:
        if not count:
            return
        now = self.events.now + 2 * self.settings.hop_s
        request.tokens += count
        if request.first_at < 0:
            request.first_at = now
        else:
            gap_s = now - request.last_at
            self.gaps.add(gap_s)
            request.late += gap_s > self.settings.targets.inter_token_s
        request.last_at = now

    def _granted(self, attempt: Attempt, event: SeatGranted) -> None:
        attempt.router.turnstile.seated(attempt.admitted, self.events.now)
        if event.grant is None or attempt.prefill is None:
            return
        self._grants[event.grant.grant_id] = attempt
        prompt = (TOKEN,) * attempt.request.prompt_tokens
        self.events.after(self.settings.hop_s, attempt.prefill.prefill, event.grant, prompt, attempt.decode)

    def _refused(self, attempt: Attempt, event: SeatRefused) -> None:
        self.refusals[event.reason] = self.refusals.get(event.reason, 0) + 1
        self._again(attempt, (attempt.decode.peer.member,))

    def _ready(self, attempt: Attempt, event: PromptReady) -> None:
        self.store.release_tokens(attempt.ticket)
        attempt.router.turnstile.committed(attempt.place, self.events.now)
        attempt.router.look()

    def _ended(self, attempt: Attempt, event: SeatEnded) -> None:
        attempt.request.preemptions += event.report.preemptions
        if event.ending.reason in COMPLETE:
            self._forget(attempt)
            attempt.router.leave(attempt.place)
            return
        self.refusals[event.ending.cause.value] = self.refusals.get(event.ending.cause.value, 0) + 1
        self._again(attempt, (attempt.prefill.peer.member,) if attempt.prefill is not None else ())

    def _accepted(self, attempt: Attempt) -> None:
        attempt.router.turnstile.accepted(attempt.admitted, self.events.now)

    def _prefill_failed(self, attempt: Attempt) -> None:
        lost = LosePrefill(attempt.seat, Cause.PREFILL_FAILED, drained=True)
        self.events.after(self.settings.hop_s, attempt.decode.send, lost)

    def _again(self, attempt: Attempt, avoid: Sequence[str]) -> None:
        self._forget(attempt)
        attempt.router.again(attempt.place, avoid)

    def _forget(self, attempt: Attempt) -> None:
        del self.attempts[attempt.seat]
        self.store.release(attempt.ticket)

    def _look(self) -> None:
        self._first = (self._first + 1) % len(self.routers)
        for router in (*self.routers[self._first :], *self.routers[: self._first]):
            router.look()

    def _arrive(self, arrivals: Iterable[Arrival]) -> None:
        chunk = self.settings.prefill_step_tokens
        for number, one in enumerate(arrivals):
            idle_s = self.settings.service.prompt_s(one.prompt_tokens, chunk)
            request = Request(f"r{number}", one.at, one.prompt_tokens, one.output_tokens, idle_s)
            self.requests.append(request)
            self.lengths[request.request_id] = one.output_tokens
            self.events.at(one.at, self.routers[number % len(self.routers)].arrive, request)


_HEARD = {SeatGranted: Cell._granted, SeatRefused: Cell._refused, PromptReady: Cell._ready, SeatEnded: Cell._ended}


def _sizes(settings: CellSettings) -> tuple[int, int]:
    """Prefill and decode members."""
    if settings.policy is Policy.AGGREGATED:
        return 0, settings.prefill_members + settings.decode_members
    return settings.prefill_members, settings.decode_members

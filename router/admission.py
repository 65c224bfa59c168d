"""Admission as the routes of a router use it: the turnstile with this process's clock, and a future for each that waits.

Nothing here waits for anyone: whenever something changed (a request came, a ticket went back, a member sent news) the queue
is looked through once, and who fits gets a ticket. The store's word is asked by the route, after it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from lifecycle.record import AttemptKey
from router import turnstile
from router.budget import BudgetBook, LimitsOf
from router.member_link import Member, Role
from router.members import Members
from router.nearness import PromptPrefix
from router.placement import Dice
from router.queue import Waiting, WaitingQueue
from router.request import ValidatedRequest
from router.stop import Stop
from router.store import Reservations
from router.turnstile import AdmissionSettings, Turnstile
from rpc import clocks

__all__ = ["Admission", "AdmissionSettings", "Admitted", "Place"]

Admitted = turnstile.Admitted[Member]


@dataclass(eq=False, slots=True, kw_only=True)
class Place(turnstile.Place[Member]):
    """A place with the future of its next ticket."""

    future: "asyncio.Future[Admitted]"


class Admission:
    """The waiting requests and the tickets of one router."""

    def __init__(self, members: Members, settings: AdmissionSettings, rng: Dice, budgets: LimitsOf | None = None) -> None:
        self._members = members
        self._settings = settings
        self._turnstile: Turnstile[Member] = Turnstile(members, settings, rng, hints=members.hints, budgets=budgets)

    @property
    def queue(self) -> WaitingQueue:
        """What waits."""
        return self._turnstile.queue

    @property
    def book(self) -> BudgetBook:
        """The tickets' claims."""
        return self._turnstile.book

    @contextmanager
    def enter(self, request: ValidatedRequest, arrived_at: float, *, returned: bool = False) -> Iterator[Place]:
        """A place in the queue, left at the end whatever happens. `returned`: the client says that it tried before. Raises
        QueueFull, and WaitTooLong for a request that would wait for too long."""
        place = self._place(request, arrived_at)
        place.returned = returned
        self._turnstile.enter(place)
        self.look()
        self._turnstile.not_in_vain(place, request.limits.queue_s, clocks.monotonic())
        try:
            yield place
        finally:
            self._leave(place)

    @contextmanager
    def enter_seated(self, request: ValidatedRequest, arrived_at: float, decode: Member, held: Reservations) -> Iterator[Place]:
        """A place of a request that has its seat already, and the ticket for what it holds, whatever the limits are."""
        place = self._place(request, arrived_at)
        self._turnstile.enter_seated(place, decode, held.placement, held.claims, clocks.monotonic())
        try:
            yield place
        finally:
            self._leave(place)

    @asynccontextmanager
    async def ticket(self, place: Place, stop: Stop) -> AsyncIterator[Admitted]:
        """Waits for a ticket; inside it is held. Raises Stopped when the request has to end first."""
        admitted = await stop.until(place.future)
        try:
            yield admitted
        finally:
            self._release(place)

    def again(
        self,
        place: Place,
        key: AttemptKey,
        *,
        chosen_tokens: int = 0,
        outputs: int = 1,
        moved: bool = False,
        alone: bool = False,
        avoid: tuple[str, ...] = (),
        wait_s: float = 0.0,
    ) -> None:
        """Back to the queue for attempt `key`, age kept; members to `avoid` are left out for a moment. `moved`, `alone`: as in
        Need."""
        self._release(place)
        place.chosen_tokens, place.moved, place.alone, place.outputs = chosen_tokens, moved, alone, outputs
        place.key, place.future = key, self._future()
        self._turnstile.again(place, avoid, clocks.monotonic(), wait_s)
        self.look()
        for delay_s in {wait_s, self._settings.exclude_s if avoid else 0.0} - {0.0}:
            asyncio.get_running_loop().call_later(delay_s, self.look)

    def not_moved(self, place: Place) -> None:
        """The seat that the KV was to come from is gone: the request needs a prefill member as any other."""
        if place.moved:
            place.moved = False
            self.look()

    def refute(self, admitted: Admitted, place: Place) -> None:
        """The decode member had not what it was thought to have of the prompt: it is not asked to compute the rest again."""
        self._turnstile.refute(place, admitted.decode)

    def could_move(self, place: Place, chosen_tokens: int) -> bool:
        """Whether another decode member than the one that drains has room for a running request now."""
        return self._turnstile.could_move(place, chosen_tokens, clocks.monotonic())

    def seated(self, admitted: Admitted) -> None:
        """The decode member has given the seat: its next news will count it."""
        self._turnstile.seated(admitted, clocks.monotonic())

    def accepted(self, admitted: Admitted) -> None:
        """The prefill member has the prompt in its queue: its next news will count it."""
        self._turnstile.accepted(admitted, clocks.monotonic())

    def committed(self, place: Place) -> None:
        """The hand-over is complete: prompt tokens go back, pages stay."""
        if place.admitted is not None:
            self._turnstile.committed(place, clocks.monotonic())
            self.look()

    def has_members(self) -> bool:
        """Whether the pools have members that take work, busy or not."""
        prefill = self._members.taking(Role.PREFILL)
        return any(prefill or one.info.computes_prompts for one in self._members.taking(Role.DECODE))

    def computes_prompts(self) -> bool:
        """Whether a decode member that takes work computes prompts."""
        return any(one.info.computes_prompts for one in self._members.taking(Role.DECODE))

    def look(self) -> None:
        """Give tickets to all that fit now."""
        for place in self._turnstile.look(clocks.monotonic()):
            assert isinstance(place, Place) and place.admitted is not None
            # Done already: stopped in this very moment; its context gives the ticket back.
            if not place.future.done():
                place.future.set_result(place.admitted)

    def ready_tokens(self) -> int:
        """Prompt tokens whose KV came to be where it was wanted, since the start."""
        return self._turnstile.ready_tokens

    def tickets(self) -> int:
        """Tickets held now."""
        return self._turnstile.tickets

    def check(self) -> list[str]:
        """Sentences about books that do not balance."""
        return self._turnstile.check()

    def _place(self, request: ValidatedRequest, arrived_at: float) -> Place:
        waiting = Waiting(request.request_id, request.tenant, request.priority, request.prompt_tokens, arrived_at)
        key = AttemptKey(request.request_id, 1)
        alone = request.delivery.scores_prompt
        prefix = PromptPrefix(request.prompt_token_ids, request.prefix_salt)
        prompt, most = request.prompt_tokens, request.max_output_tokens
        made = request.choices.made
        return Place(
            waiting, prompt, most, key, alone=alone, prefix=prefix, outputs=made, adapter=request.adapter, future=self._future()
        )

    def _leave(self, place: Place) -> None:
        held = place.admitted is not None
        self._turnstile.leave(place, clocks.monotonic())
        if held:
            self.look()

    def _release(self, place: Place) -> None:
        if place.admitted is not None:
            self._turnstile.release(place, clocks.monotonic())
            self.look()

    @staticmethod
    def _future() -> "asyncio.Future[Admitted]":
        return asyncio.get_running_loop().create_future()

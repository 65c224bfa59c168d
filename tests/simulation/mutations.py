"""Mistakes planted into a running world, to see that its checkers notice. Each is put in when a process starts.

A mistake takes the place of one decision of one object; nothing else changes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from decode_svc.messages import DrainAnswer, EndChoice, NoticesArrived, OutputMade
from kv_transfer.grants import AnswerLater, Committed, Counted, ReaderState
from kv_transfer.plan import Notice
from router.progress import Progress
from router.redis_scripts import NAMES, script
from router.stop import Stop
from router.tenant_limits import TenantLimits
from tests.simulation.cell import Host, Making
from tests.simulation.world import run

#: What a mistake that does not fit the code any more ends with wherever it is met.
_MISFITS = ("TypeError(", "AttributeError(", "NameError(")


class NotPlanted(Exception):
    """A mistake does not fit the code any more: what breaks is the mistake itself, and checkers have no part in it."""


def decode(plant: Callable[[Any, Host], None]) -> Callable[[Host], None]:
    """A mistake in the scheduler of each decode member."""
    return lambda host: plant(host.engine.worker._scheduler, host) if host.kind == "decode" and host.engine else None


def prefill(plant: Callable[[Any, Host], None]) -> Callable[[Host], None]:
    """A mistake in the scheduler of each prefill member."""
    return lambda host: plant(host.engine.worker._scheduler, host) if host.kind == "prefill" and host.engine else None


def router(plant: Callable[[Any, Host], None]) -> Callable[[Host], None]:
    """A mistake in the parts of each router."""
    return lambda host: plant(host.application._parts, host) if host.kind == "router" else None


def _free_before_drain(scheduler: Any, host: Host) -> None:
    take_back = scheduler.handovers.take_back
    scheduler.handovers.take_back = lambda grant_id, drained: take_back(grant_id, True)


def _commit_before_all_parts(scheduler: Any, host: Host) -> None:
    arrived = scheduler.handovers.arrived

    def early(writer: str, data: bytes, now: float) -> Any:
        number, outcome = arrived(writer, data, now)
        notice = Notice.from_bytes(data)
        for part in range(notice.parts):
            if isinstance(outcome, Counted):
                number, outcome = arrived(writer, replace(notice, part=part).to_bytes(), now)
        return number, outcome

    scheduler.handovers.arrived = early


def _committed_again(scheduler: Any, host: Host) -> None:
    """A part of a hand-over that is complete completes it once more."""
    arrived, done = scheduler.handovers.arrived, {}

    def again(writer: str, data: bytes, now: float) -> Any:
        number, outcome = arrived(writer, data, now)
        if isinstance(outcome, Committed):
            done[outcome.grant_id] = number, outcome
        return done.get(outcome.grant_id, (number, outcome))

    scheduler.handovers.arrived = again


def _committed_after_revocation(scheduler: Any, host: Host) -> None:
    """A grant that was taken back is filled as if nobody had asked for it."""
    arrived, book = scheduler.handovers.arrived, scheduler.handovers.book

    def late(writer: str, data: bytes, now: float) -> Any:
        entry = book._open.get(Notice.from_bytes(data).grant_id)
        if entry is not None:
            entry.state = ReaderState.OFFERED
        return arrived(writer, data, now)

    scheduler.handovers.arrived = late


def _prefixes_by_length(scheduler: Any, host: Host) -> None:
    """A prompt is taken for any other one of its length."""
    prefixes = scheduler.memory.prefixes if host.kind == "decode" else scheduler.prefixes
    extend = prefixes.extend
    prefixes.extend = lambda keys, salt, token_ids: extend(keys, salt, (1,) * len(token_ids))


def _half_pages_indexed(scheduler: Any, host: Host) -> None:
    """A page is found before all its tokens are in it."""
    memory = scheduler.memory
    remember = memory.remember

    def early(holding: Any, tokens: int, known: Any) -> None:
        whole = min(len(table) for table in holding.tables) * memory.prefixes.page_tokens
        remember(
            holding,
            min(whole, tokens + memory.prefixes.page_tokens - 1),
            lambda first, end: (*known(first, end), *(97,) * end)[: end - first],
        )

    memory.remember = early


def _stale_output_taken(scheduler: Any, host: Host) -> None:
    """What a seat of an earlier attempt says goes to the stream of the present one."""
    streams = host.service.streams  # type: ignore[attr-defined]
    deliver = streams.deliver

    def latest(event: Any, now: float) -> Any:
        stream = streams._streams.get(event.seat)
        if stream is not None and isinstance(event, OutputMade):
            same = [one for one in streams.open() if one.origin.key.request_id == stream.origin.key.request_id]
            last = max(same, key=lambda one: one.origin.key.attempt, default=stream)
            if last is not stream:
                event = event._replace(seat=last.number)
        return deliver(event, now)

    streams.deliver = latest


def _step_told_twice(scheduler: Any, host: Host) -> None:
    streams, counter = host.service.streams, iter(range(1 << 30))  # type: ignore[attr-defined]
    deliver = streams.deliver

    def twice(event: Any, now: float) -> Any:
        if isinstance(event, OutputMade) and next(counter) % 10 == 9:
            deliver(event, now)
        return deliver(event, now)

    streams.deliver = twice


def _landing_row_shared(scheduler: Any, host: Host) -> None:
    """The row of a committed grant is free before its logits were read."""
    memory = scheduler.memory
    commit, free_row = memory.commit, memory.free_row

    def early(holding: Any, grant_id: str) -> Any:
        row = commit(holding, grant_id)
        if row is not None:
            free_row(row)
        return row

    memory.commit = early
    memory.free_row = lambda row: None


def _silent_writer_believed_still(scheduler: Any, host: Host) -> None:
    answered = scheduler.handovers.drain_answered
    scheduler.handovers.drain_answered = lambda grant_id, answer, now: answered(grant_id, DrainAnswer.STOPPED, now)


def _notices_lost(scheduler: Any, host: Host) -> None:
    """Every tenth batch of notices is dropped and nobody looks after the grant."""
    accept, counter = scheduler.accept, iter(range(1 << 30))

    def losing(commands: Any, now: float) -> None:
        accept([one for one in commands if not (isinstance(one, NoticesArrived) and next(counter) % 10 == 9)], now)

    scheduler.accept = losing
    scheduler.handovers.book.expired = lambda now: []


def _drain_answered_early(scheduler: Any, host: Host) -> None:
    drain = scheduler._writer.drain

    def early(grant_id: str, asker: int) -> Any:
        answer = drain(grant_id, asker)
        if isinstance(answer, AnswerLater):
            scheduler._writer._askers[grant_id].remove(asker)
            scheduler._answer_drain(asker, False)
        return answer

    scheduler._writer.drain = early


def _source_pages_leak(scheduler: Any, host: Host) -> None:
    """Pages of every third prompt are never given back."""
    pool, counter = scheduler._pools[0], iter(range(1 << 30))
    release = pool.release
    pool.release = lambda holder: 0 if next(counter) % 3 == 2 else release(holder)


def _terminal_twice(parts: Any, host: Host) -> None:
    def twice(stream: Any) -> None:
        end = stream.end

        def ends(terminal: bytes | None, status: Any) -> None:
            if terminal is not None:
                stream.put(terminal)
            end(terminal, status)

        stream.end = ends

    _on_start(parts, lambda route: twice(route.stream))


def _cancel_forgotten_in_queue(parts: Any, host: Host) -> None:
    ticket = parts.admission.ticket
    parts.admission.ticket = lambda place, stop: ticket(place, Stop())


def _lost_refund(parts: Any, host: Host) -> None:
    book, counter = parts.admission.book, iter(range(1 << 30))
    release = book.release
    book.release = lambda ticket: None if next(counter) % 4 == 3 else release(ticket)


class _DoublesToken(Progress):
    __slots__ = ()

    def new_attempt(self, *, moved: bool) -> None:
        Progress.new_attempt(self, moved=moved)
        if self.output_token_ids:
            self.output_token_ids.append(self.output_token_ids[-1])


class _ReusesNumber(Progress):
    __slots__ = ()

    def new_attempt(self, *, moved: bool) -> None:
        Progress.new_attempt(self, moved=moved)
        if self.next_sequence_no > 2:
            self.next_sequence_no -= 1


class _ForgetsText(Progress):
    __slots__ = ()

    def new_attempt(self, *, moved: bool) -> None:
        Progress.new_attempt(self, moved=moved)
        self.text_bytes = max(0, self.text_bytes - 1)


def _progress(kind: type[Progress]) -> Callable[[Any, Host], None]:
    def plant(route: Any) -> None:
        choices = route.progress.choices
        route.progress = kind(route.progress.prompt_tokens, route.progress.arrived_at)
        route.progress.choices = choices

    return lambda parts, host: _on_start(parts, plant)


def _on_start(parts: Any, plant: Callable[[Any], None]) -> None:
    start = parts.routes.start

    def starts(*arguments: Any, **named: Any) -> Any:
        route = start(*arguments, **named)
        plant(route)
        return route

    parts.routes.start = starts


class _ForgetsEnds(Progress):
    """The end of a choice is not kept, so the next attempt makes it again."""

    __slots__ = ()

    def output(self, one: Any, now: float) -> None:
        Progress.output(self, one, now)
        for choice in self.choices:
            choice.end = None


def _clones_lost(scheduler: Any, host: Host) -> None:
    """Siblings get pages of their own for what they will write into, and nothing in them."""
    scheduler.families.take_clones = lambda: []


def _siblings_cancelled_too(scheduler: Any, host: Host) -> None:
    """A cancel of one choice reaches the others."""

    def all_of(command: EndChoice, now: float) -> None:
        seat = scheduler.seats.get(command.seat)
        for sibling in seat.family.seats if seat is not None else ():
            sibling.end_with(command.ending, command.requested_at)

    scheduler._handlers[EndChoice] = all_of


class _CountsOn(TenantLimits):
    __slots__ = ()

    def ended(self, tenant: str, chosen_tokens: int, now: float) -> None:
        pass


def _counts_on(parts: Any, host: Host) -> None:
    parts.routes.cell.tenants.__class__ = _CountsOn


def lua(*changes: tuple[str, str]) -> Callable[[str], str]:
    """Other texts in the store's scripts."""
    for before, _ in changes:
        if not any(before in script(name).text for name in NAMES):
            raise NotPlanted(f"no script says {before!r}")

    def changed(text: str) -> str:
        for before, after in changes:
            text = text.replace(before, after)
        return text

    return changed


#: Checks of the scripts, each with what stands in its place.
_ANY_OWNER = ("if record.router ~= copy.fields.router then", "if false then")
_ANY_ORDER = (
    ("if tonumber(record.attempt) > tonumber(copy.fields.attempt) then", "if false then"),
    ("if tonumber(record.revision) >= tonumber(copy.fields.revision) then", "if false then"),
)
_ADOPTS_FROM_ALL = ("if expiry and tonumber(expiry) > server_time() then\n    return cjson", "if false then\n    return cjson")
_ALL_DEAD = (
    ("if expiry and tonumber(expiry) > server_time() then\n  return 'alive'", "if false then\n  return 'alive'"),
    ("'-inf', now, 'BYSCORE', 'LIMIT'", "'-inf', '+inf', 'BYSCORE', 'LIMIT'"),
    ("return { alive and 1 or 0", "return { 0"),
)
_BEYOND = ("if taken + claim.amount > claim.limit then", "if false then")

MUTATIONS: dict[str, Making] = {
    "pages are free before the writer has answered": Making(plant=decode(_free_before_drain)),
    "a hand-over is committed before all parts are there": Making(plant=decode(_commit_before_all_parts)),
    "a step is told twice": Making(plant=decode(_step_told_twice)),
    "a landing row is free before its logits were read": Making(plant=decode(_landing_row_shared)),
    "a silent writer is believed to be still": Making(plant=decode(_silent_writer_believed_still)),
    "a lost notice is never missed": Making(plant=decode(_notices_lost)),
    "a Drain is answered while writes are in flight": Making(plant=prefill(_drain_answered_early)),
    "source pages leak": Making(plant=prefill(_source_pages_leak)),
    "the terminal event is sent twice": Making(plant=router(_terminal_twice)),
    "a cancel is forgotten in the queue": Making(plant=router(_cancel_forgotten_in_queue)),
    "a ticket is not given back": Making(plant=router(_lost_refund)),
    "the last token is told twice to the next member": Making(plant=router(_progress(_DoublesToken))),
    "a sequence number is used again": Making(plant=router(_progress(_ReusesNumber))),
    "a byte of text is sent again": Making(plant=router(_progress(_ForgetsText))),
    "siblings find nothing in the pages that they do not share": Making(plant=decode(_clones_lost)),
    "a cancel of one choice ends them all": Making(plant=decode(_siblings_cancelled_too)),
    "the end of a choice is forgotten": Making(plant=router(_progress(_ForgetsEnds))),
    "a tombstone is lost": Making(scripts=lua(("redis.call('HSET', KEYS[3], id, note)", ""))),
    "a hand-over is committed twice": Making(plant=decode(_committed_again)),
    "a hand-over is committed after it was taken back": Making(plant=decode(_committed_after_revocation)),
    "output of an earlier attempt is taken for the present one": Making(plant=decode(_stale_output_taken)),
    "decode takes a prompt for any other of its length": Making(plant=decode(_prefixes_by_length)),
    "prefill takes a prompt for any other of its length": Making(plant=prefill(_prefixes_by_length)),
    "a page is found before it is full": Making(plant=decode(_half_pages_indexed)),
    "a write of a router that is not the owner is carried out": Making(scripts=lua(_ANY_OWNER)),
    "a write that was overtaken is carried out, of an earlier attempt too": Making(scripts=lua(*_ANY_ORDER)),
    "a request of a living router is adopted": Making(scripts=lua(_ADOPTS_FROM_ALL)),
    "every router is held to be dead, wherever it is asked": Making(scripts=lua(_ADOPTS_FROM_ALL, *_ALL_DEAD)),
    "a tenant's request that has ended counts on": Making(plant=router(_counts_on)),
    "the store gives tickets beyond every limit": Making(scripts=lua(_BEYOND)),
    "a repeated ticket is counted twice": Making(
        scripts=lua(("redis.call('HSETNX', reserved, field, claim.amount) == 1", "redis.call('HSET', reserved, field, 1) >= 0"))
    ),
}


def shown(making: Making, seed: int) -> str:
    """What is found in the world of a seed with a mistake in it; empty when nothing is. Raises NotPlanted."""
    faults = run(seed, making).faults
    for fault in faults:
        if any(misfit in fault for misfit in _MISFITS):
            raise NotPlanted(f"seed {seed}: {fault}")
    return faults[0] if faults else ""

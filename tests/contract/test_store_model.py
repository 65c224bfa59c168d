"""The store against a dumb model: any interleaving of calls of two routers, each executed once to three times, and repeated
again when it is long over, comes to what the model says."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import TABLE, TERMINAL, Event, State
from router.redis_link import Keys, RedisLink, RedisSettings
from router.redis_store import RedisStore
from router.store import CancelOutcome, CreateOutcome, LiveRequest, Reservations, WriteOutcome, WriteResult
from tests.redis_server import Clock, holds, new_cell, new_record, pages, ready_to_reap, redis_url, tokens

__all__ = ["redis_url"]

IDS = ("a", "b", "c", "d", "e")
ROUTERS = ("router-a", "router-b")
PAGE_LIMIT, TOKEN_LIMIT = 10, 100
LOSS = {State.ADMITTED: Event.REFUSED, State.PREFILLING: Event.PREFILL_LOST, State.DECODING: Event.DECODE_LOST}
#: Events that go on towards an end, besides tickets, losses and cancels.
FORWARD = (Event.ACCEPTED, Event.SENT, Event.COMMITTED, Event.STOPPED, Event.REFUSED)
#: Calls whose late repetition is not guarded by the record (they say that the router lives), so they are repeated at once only.
AT_ONCE = ("heartbeat",)


class RepeatingLink(RedisLink):
    """Runs each script as often as told, as a client does that gets no answer, and any earlier one again."""

    def __init__(self, redis_settings: RedisSettings) -> None:
        super().__init__(redis_settings)
        self.times = 1
        self.past: list[tuple[str, list[str], list[str | int | float]]] = []

    async def run(self, name: str, keys: list[str], arguments: list[str | int | float]) -> object:
        if name not in AT_ONCE:
            self.past.append((name, keys, arguments))
        for _ in range(self.times - 1):
            await super().run(name, keys, arguments)
        return await super().run(name, keys, arguments)

    async def again(self, which: int) -> None:
        """An earlier call reaches the server only now, or once more; nobody reads the answer."""
        if self.past:
            name, keys, arguments = self.past[which % len(self.past)]
            await super().run(name, keys, arguments)


@dataclass
class Known:
    """What the model knows about a request: the record as its owner has it, what it holds, whether a cancel is flagged."""

    record: RequestRecord
    held: dict[str, int] = field(default_factory=dict)
    claims: Reservations | None = None
    flagged_at: float | None = None

    @property
    def flagged(self) -> bool:
        return self.flagged_at is not None

    @property
    def stored(self) -> RequestRecord:
        """The record as the store should have it: with the flag, whether or not the owner has heard of it."""
        if self.flagged_at is None:
            return self.record
        return replace(self.record, cancel_requested_at=self.flagged_at, cancel_reason="reason")

    @property
    def live(self) -> bool:
        return self.record.state not in TERMINAL

    def settle(self) -> None:
        """Give back what the state may not hold."""
        if self.record.state in TERMINAL or self.record.state is State.QUEUED:
            self.held, self.claims = {}, None
        elif self.record.state is State.DECODING:
            self.held = {label: units for label, units in self.held.items() if label.startswith("pages")}


class StoreMachine(RuleBasedStateMachine):
    """One cell, two routers. `url` is set by the test."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.clock = itertools.count(1000)
        self.leases = Clock()
        self.known: dict[str, Known] = {}
        self.tombstones: set[str] = set()

    @initialize()
    def open(self) -> None:
        where = RedisSettings(url=self.url, cell=new_cell())
        self.links = {router: RepeatingLink(where) for router in ROUTERS}
        self.stores = {router: RedisStore(where, router, link=self.links[router], clock=self.leases) for router in ROUTERS}
        for request_id, router in zip(IDS, ROUTERS, strict=False):
            self.create(request_id, router, 1, "body")

    def teardown(self) -> None:
        for store in self.stores.values():
            self.loop.run(store.close())
        self.loop.close()

    def run(self, router: str, times: int, call):
        self.links[router].times = times
        return self.loop.run(call)

    def now(self) -> float:
        return next(self.clock) + 0.125

    def live(self, *states: State) -> list[str]:
        """Ids of live requests, in one of the states if any are given."""
        return sorted(name for name, k in self.known.items() if k.live and (not states or k.record.state in states))

    ids = st.sampled_from(IDS)
    routers = st.sampled_from(ROUTERS)
    dices = st.integers(0, 9)
    rarely = st.integers(0, 7).map(lambda number: number > 5)
    members = st.sampled_from(["decode-0", "decode-1"])
    times = st.integers(1, 3)

    @rule(request_id=ids, router=routers, times=times, body=st.sampled_from(["body", "body", "other"]))
    def create(self, request_id: str, router: str, times: int, body: str) -> None:
        record = new_record(request_id, router, fingerprint=body, at=self.now())
        result = self.run(router, times, self.stores[router].create(record))
        known = self.known.get(request_id)
        if known is not None:
            same = known.record.fingerprint == body
            assert result.outcome is (CreateOutcome.EXISTING if same else CreateOutcome.CONFLICT)
        elif request_id in self.tombstones:
            assert result.outcome is CreateOutcome.ALREADY_CANCELLED
            assert result.record.state is State.CANCELLED
            self.tombstones.discard(request_id)
            self.known[request_id] = Known(result.record, flagged_at=result.record.cancel_requested_at)
        else:
            assert result.outcome is CreateOutcome.CREATED
            assert result.record == record
            self.known[request_id] = Known(record)
            # Some are queued right away, so that more of the steps are about running ones.
            if times < 3:
                record.advance(Event.ACCEPTED, self.now())
                assert self.run(router, times, self.stores[router].advance(record)).applied

    @rule(request_id=ids, router=routers, times=times, amount=st.integers(0, 7), member=members)
    def begin(self, request_id: str, router: str, times: int, amount: int, member: str) -> None:
        """Created with its first ticket; what is there already is told as by create, and changed no more than by it."""
        record, wanted = new_record(request_id, router, fingerprint="body", at=self.now()), self.wanted(amount, member)
        result = self.run(router, times, self.stores[router].begin(record, wanted, self.now()))
        known = self.known.get(request_id)
        if known is not None:
            same = known.record.fingerprint == "body"
            assert result.created.outcome is (CreateOutcome.EXISTING if same else CreateOutcome.CONFLICT)
        elif request_id in self.tombstones:
            assert result.created.outcome is CreateOutcome.ALREADY_CANCELLED
            self.tombstones.discard(request_id)
            self.known[request_id] = Known(result.created.record, flagged_at=result.created.record.cancel_requested_at)
        else:
            assert result.created.outcome is CreateOutcome.CREATED and result.ticket is not None
            self.known[request_id] = known = Known(record)
            self.placed(known, wanted, 1, result.ticket)
            return
        assert result.ticket is None and record.state is State.CREATED

    @precondition(lambda self: self.live())
    @rule(
        steps=st.lists(
            st.tuples(st.integers(0, 99), times, st.integers(0, 7), members, st.integers(0, 9)), min_size=2, max_size=8
        )
    )
    def progress(self, steps: list[tuple[int, int, int, str, int]]) -> None:
        for which, times, amount, member, dice in steps:
            live = self.live()
            if live:
                self.go_on(self.known[live[which % len(live)]], times, self.wanted(amount, member), dice)

    def go_on(self, known: Known, times: int, wanted: Reservations, dice: int) -> None:
        """One request goes on: mostly along the way, sometimes back."""
        store = self.stores[known.record.router]
        if known.record.state is State.QUEUED and dice > 0:
            self.admit(known, store, wanted, times)
        elif known.record.state in LOSS and dice < 3:
            self.retry(known, store, None if dice == 0 else wanted, times)
        elif known.record.state in (State.DRAINING, State.CANCEL_REQUESTED) or dice == 9:
            self.finish(known, store, times)
        else:
            self.advance(known, store, times, dice)

    def admit(self, known: Known, store: RedisStore, wanted: Reservations, times: int) -> None:
        attempt = known.record.attempt
        result = self.run(known.record.router, times, store.admit(known.record, wanted, self.now()))
        self.placed(known, wanted, attempt, result)

    def retry(self, known: Known, store: RedisStore, offered: Reservations | None, times: int) -> None:
        record, attempt = known.record, known.record.attempt
        result = self.run(record.router, times, store.retry(record, LOSS[record.state], offered, self.now()))
        known.held, known.claims = {}, None
        if offered is None:
            assert result.applied
            assert (record.state, record.attempt) == (State.QUEUED, attempt + 1)
        else:
            self.placed(known, offered, attempt + 1, result)

    def wanted(self, amount: int, member: str) -> Reservations:
        return holds(pages(amount, PAGE_LIMIT, member), tokens(amount * 9, TOKEN_LIMIT), decode=member)

    def placed(self, known: Known, wanted: Reservations, attempt: int, result: WriteResult) -> None:
        """An attempt was to be placed: it was if all fits beside what the others hold."""
        record = known.record
        fits = all(self.total(claim.budget.label) + claim.amount <= claim.limit for claim in wanted.claims)
        assert result.outcome is (WriteOutcome.APPLIED if fits else WriteOutcome.SHORT)
        assert result.cancel_requested is known.flagged
        assert record.state is (State.ADMITTED if fits else State.QUEUED)
        assert record.attempt == attempt
        if fits:
            known.held = {claim.budget.label: claim.amount for claim in wanted.claims if claim.amount}
            known.claims = wanted

    def advance(self, known: Known, store: RedisStore, times: int, dice: int) -> None:
        for _ in range(1 + dice % 3):
            events = [event for event in FORWARD if (known.record.state, event) in TABLE]
            if known.flagged and (known.record.state, Event.CANCEL) in TABLE:
                events.append(Event.CANCEL)
            if events:
                known.record.advance(events[dice % len(events)], self.now())
                known.settle()
        result = self.run(known.record.router, times, store.advance(known.record))
        assert result.applied
        assert result.state is known.record.state

    @precondition(lambda self: self.live())
    @rule(times=times, rarely=rarely)
    def owners_assert(self, times: int, rarely: bool) -> None:
        if rarely:
            self.assert_all(times)

    def assert_all(self, times: int) -> None:
        for router in ROUTERS:
            live = [LiveRequest(k.record, k.claims) for k in self.known.values() if k.live and k.record.router == router]
            results = self.run(router, times, self.stores[router].assert_live(live))
            assert all(result.applied for result in results.values())
            assert len(results) == len(live)

    def finish(self, known: Known, store: RedisStore, times: int) -> None:
        record = known.record
        if record.state is State.DECODING:
            record.advance(Event.STOPPED, self.now())
        ways = {
            State.DRAINING: (Event.DELIVERED, FinishReason.EOS),
            State.CANCEL_REQUESTED: (Event.RELEASED, FinishReason.CANCELLED),
        }
        event, reason = ways.get(record.state, (Event.FAIL, FinishReason.MODEL_ERROR))
        record.advance(event, self.now())
        record.ending = Ending(reason, Cause.NONE)
        known.settle()
        result = self.run(record.router, times, store.finish(record))
        assert result.won
        assert result.record == known.stored
        known.record = known.stored

    @rule(request_id=ids, router=routers, times=times, seldom=st.integers(0, 3))
    def cancel(self, request_id: str, router: str, times: int, seldom: int) -> None:
        if seldom:
            return
        at = self.now()
        result = self.run(router, times, self.stores[router].request_cancel(request_id, "reason", at))
        known = self.known.get(request_id)
        if known is None:
            self.tombstones.add(request_id)
            assert (result.outcome, result.state) == (CancelOutcome.ACCEPTED, None)
        elif known.live:
            assert (result.outcome, result.state) == (CancelOutcome.ACCEPTED, known.record.state)
            assert result.owner == known.record.router
            if not known.flagged:
                known.flagged_at = at
        else:
            assert (result.outcome, result.ending) == (CancelOutcome.ALREADY_ENDED, known.record.ending)

    @precondition(lambda self: any(known.flagged for known in self.known.values()))
    @rule(router=routers)
    def heartbeat(self, router: str) -> None:
        flagged = {name for name, known in self.known.items() if known.live and known.flagged and known.record.router == router}
        assert self.run(router, 2, self.stores[router].heartbeat()) == flagged

    @precondition(lambda self: self.live())
    @rule(router=routers, which=st.integers(0, 1000))
    def something_comes_late(self, router: str, which: int) -> None:
        self.loop.run(self.links[router].again(which))

    @precondition(lambda self: self.live())
    @rule(dead=routers, times=times, rarely=rarely)
    def router_dies(self, dead: str, times: int, rarely: bool) -> None:
        if not rarely:
            return
        other = next(router for router in ROUTERS if router != dead)
        self.run(dead, 1, self.stores[dead].leave())
        self.run(other, 1, ready_to_reap(self.stores[other], self.leases))
        mine = {name for name, known in self.known.items() if known.live and known.record.router == dead}
        at = self.now()
        report = self.run(other, 1, self.stores[other].reap(at))
        assert set(report.ended) == mine
        for name in mine:
            known = self.known[name]
            stored = self.loop.run(self.stores[other].get(name))
            assert stored is not None
            assert stored.state is (State.CANCELLED if known.flagged else State.FAILED)
            known.record = stored
            known.settle()
        self.run(dead, times, self.stores[dead].heartbeat())

    @precondition(lambda self: self.live())
    @rule(times=times, rarely=rarely)
    def memory_is_lost(self, times: int, rarely: bool) -> None:
        if not rarely:
            return
        link = self.links[ROUTERS[0]]

        async def forget() -> None:
            async with Redis.from_url(self.url) as server:
                keys = [key async for key in server.scan_iter(match=f"{{{link.settings.cell}}}:*")]
                if keys:
                    await server.delete(*keys)
                await server.script_flush()

        self.loop.run(forget())
        self.tombstones.clear()
        self.known = {name: known for name, known in self.known.items() if known.live}
        for known in self.known.values():
            # A flag that its owner had not heard of is lost with the rest.
            known.flagged_at = known.record.cancel_requested_at
        for other in self.links.values():
            other.past.clear()
        self.assert_all(times)
        for router in ROUTERS:
            self.run(router, 1, self.stores[router].heartbeat())
        self.loop.run(self.all_have_told(Keys(link.settings.cell).memory))

    async def all_have_told(self, memory: str) -> None:
        """The time for it is over, without waiting."""
        async with Redis.from_url(self.url) as server:
            await server.hset(memory, "settled_at", 0)

    def total(self, label: str) -> int:
        return sum(known.held.get(label, 0) for known in self.known.values())

    @invariant()
    def store_equals_model(self) -> None:
        if not hasattr(self, "stores"):
            return
        store = self.stores[ROUTERS[0]]
        for request_id in IDS:
            known = self.known.get(request_id)
            assert self.loop.run(store.get(request_id)) == (known and known.stored)
        books = self.loop.run(store.books())
        labels = {label for known in self.known.values() for label in known.held}
        assert books.reserved == {label: self.total(label) for label in labels}
        assert books.faults == ()
        assert books.live_requests == sum(known.live for known in self.known.values())
        assert books.tombstones == len(self.tombstones)


@pytest.mark.slow
def test_any_interleaving_equals_the_model(redis_url: str) -> None:
    machine = type("Machine", (StoreMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_long_run_equals_the_model(redis_url: str, seed: int) -> None:
    """As above without the search for small examples: one long mixed history, most of it about running requests."""
    rng = random.Random(seed)
    machine = type("Machine", (StoreMachine,), {"url": redis_url})()
    machine.open()

    def progress() -> None:
        machine.progress([(rng.randrange(99), rng.randint(1, 3), rng.randrange(8), "decode-0", rng.randrange(10))])

    def create() -> None:
        machine.create(rng.choice(IDS), rng.choice(ROUTERS), rng.randint(1, 3), rng.choice(["body", "body", "other"]))

    actions = {
        progress: 60,
        create: 10,
        lambda: machine.cancel(rng.choice(IDS), rng.choice(ROUTERS), rng.randint(1, 3), 0): 3,
        lambda: machine.something_comes_late(rng.choice(ROUTERS), rng.randrange(1000)): 30,
        lambda: machine.assert_all(rng.randint(1, 3)): 4,
        lambda: machine.heartbeat(rng.choice(ROUTERS)): 4,
        lambda: machine.router_dies(rng.choice(ROUTERS), rng.randint(1, 3), True): 1,
        lambda: machine.memory_is_lost(rng.randint(1, 3), True): 4,
    }
    try:
        for action in rng.choices(list(actions), weights=list(actions.values()), k=300):
            action()
            machine.store_equals_model()
    finally:
        machine.teardown()

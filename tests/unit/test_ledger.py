"""What a request's ledger does when things come at the same time."""

import asyncio
from types import SimpleNamespace

import pytest

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.keeping import AcceptedCancels, Cancel, UnansweredCreates
from router.ledger import Ledger
from router.stop import Stop, Stopped
from router.store import CreateOutcome, CreateResult, StoreUnavailable, WriteOutcome, WriteResult
from router.without_store import Outage

CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


class SlowStore:
    """Answers nothing about live records until it is let."""

    router = "router-0"

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.retries = 0
        self.forgotten = False

    async def create(self, record: RequestRecord) -> CreateResult:
        return CreateResult(CreateOutcome.CREATED, record)

    async def assert_live(self, live: list) -> dict[str, WriteResult]:
        await self.may_answer.wait()
        self.forgotten = False
        return {one.record.request_id: WriteResult(WriteOutcome.APPLIED) for one in live}

    async def advance(self, record: RequestRecord) -> WriteResult:
        return WriteResult(WriteOutcome.APPLIED)

    async def retry(self, record: RequestRecord, event: Event, holds: object, at: float, detail: str = "") -> WriteResult:
        self.retries += 1
        if self.forgotten:
            return WriteResult(WriteOutcome.UNKNOWN)
        record.advance(event, at)
        return WriteResult(WriteOutcome.APPLIED)

    async def admit(self, record: RequestRecord, holds: object, at: float) -> WriteResult:
        record.advance(Event.TICKET, at)
        return WriteResult(WriteOutcome.APPLIED)


async def created() -> tuple[SlowStore, Stop, Ledger]:
    store, stop = SlowStore(), Stop()
    record = RequestRecord("request-1", "tenant", "model", "snapshot", "body", 0, "router-0", "", 1.0)
    cell = SimpleNamespace(store=store, unwritten=None, unanswered=UnansweredCreates(store), outage=Outage.REFUSE)  # type: ignore[arg-type]
    ledger = Ledger(cell, record, stop)
    await ledger.create()
    return store, stop, ledger


@pytest.mark.parametrize("write", ["retry", "admit"])
async def test_a_cancel_while_another_write_is_waited_for_ends_the_request_in_order(write: str) -> None:
    store, stop, ledger = await created()
    with stop.tells(lambda _: ledger.observe()):
        if write == "retry":
            await ledger.admit(None)  # type: ignore[arg-type]
        asserting = asyncio.create_task(ledger.assert_live())
        await asyncio.sleep(0)
        writing = asyncio.create_task(ledger.retry(Event.REFUSED) if write == "retry" else ledger.admit(None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stop.request(CANCEL)
        store.may_answer.set()
        with pytest.raises(Stopped):
            await writing
        await asserting
    await ledger.close()
    assert ledger.record.state is State.CANCEL_REQUESTED
    assert store.retries == 0


async def test_a_store_that_forgot_the_request_is_told_before_the_next_attempt() -> None:
    store, _, ledger = await created()
    await ledger.admit(None)  # type: ignore[arg-type]
    store.may_answer.set()
    store.forgotten = True
    await ledger.retry(Event.REFUSED)
    await ledger.close()
    assert ledger.record.state is State.QUEUED
    assert store.retries == 2


async def test_a_cancel_before_the_request_goes_before_a_clock_that_ran_out_while_the_store_was_asked() -> None:
    stop, cancels = Stop(), AcceptedCancels(SlowStore())  # type: ignore[arg-type]
    cancels.add(Cancel("request-1", "not wanted", 0.5))

    class Gone(SlowStore):
        def statistics(self) -> SimpleNamespace:
            return SimpleNamespace(available=True)

        async def create(self, record: RequestRecord) -> CreateResult:
            stop.request(Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE))
            raise StoreUnavailable("create", "no answer")

    store, metrics = Gone(), SimpleNamespace(unrecorded=SimpleNamespace(inc=lambda *_: None))
    record = RequestRecord("request-1", "tenant", "model", "snapshot", "body", 0, "router-0", "", 1.0)
    unanswered = UnansweredCreates(store)  # type: ignore[arg-type]
    cell = SimpleNamespace(
        store=store, unwritten=None, unanswered=unanswered, outage=Outage.SERVE, metrics=metrics, cancels=cancels
    )
    ledger = Ledger(cell, record, stop)  # type: ignore[arg-type]
    with pytest.raises(Stopped) as stopped:
        await ledger.create()
    await ledger.close()
    assert stopped.value.ending == CANCEL
    assert (record.cancel_requested_at, record.cancel_reason) == (0.5, "not wanted")


@pytest.mark.parametrize(("asked_at", "cause"), [(1.0, Cause.CLIENT_CANCEL), (None, Cause.CLIENT_GONE)])
async def test_a_request_that_ends_as_it_is_taken_over_goes_on_ending(asked_at: float | None, cause: Cause) -> None:
    """Its router died between the cancel, or the leave of its client, and the end."""
    _, stop, ledger = await created()
    ledger.record.advance(Event.CANCEL, 2.0)
    ledger.record.cancel_requested_at = asked_at
    ledger.taken_over(None)
    assert stop.ending == Ending(FinishReason.CANCELLED, cause)
    await ledger.close()

"""The small parts of a route: early end, clocks, retries, limits, settings."""

import asyncio
import time
from dataclasses import replace

import pytest

from lifecycle.deadlines import Deadlines, Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from lifecycle.usage import Usage
from router.cell import RetryBudget
from router.config import RouterSettings
from router.discovery import BadTarget, check_target, resolve
from router.endings import status_of
from router.pool_messages import Output, SeatEnd, seat_end
from router.prefill_call import PrefillDone
from router.progress import Progress
from router.seat import Committed
from router.servicer import with_rpc_deadline
from router.stop import Clocks, Stop, Stopped
from rpc.settings import SettingsError, load_settings
from tandem.pools.v1 import decode_pb2

CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
LATE = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE)


async def test_the_first_reason_to_stop_stands() -> None:
    stop, told = Stop(), []
    with stop.tells(told.append):
        assert stop.request(CANCEL) and not stop.request(LATE)
    assert stop.ending is CANCEL and told == [CANCEL]
    with stop.tells(told.append):
        assert told == [CANCEL, CANCEL]
    with pytest.raises(Stopped):
        stop.check()


async def test_a_wait_ends_with_its_result_or_with_the_stop() -> None:
    stop = Stop()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(7)
    assert await stop.until(future) == 7
    waiting = asyncio.create_task(stop.sleep(60))
    await asyncio.sleep(0)
    stop.request(LATE)
    with pytest.raises(Stopped) as stopped:
        await waiting
    assert stopped.value.ending is LATE


async def test_a_result_that_came_first_is_not_lost_to_a_stop() -> None:
    """What was given (a ticket) reaches its holder, who gives it back."""
    stop = Stop()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(stop.until(future))
    await asyncio.sleep(0)
    future.set_result(7)
    stop.request(CANCEL)
    assert await waiting == 7


async def test_cancelling_the_waiter_is_not_a_stop() -> None:
    stop = Stop()
    waiting = asyncio.create_task(stop.sleep(60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("limits", "steps", "cause"),
    [
        (Limits(queue_s=0.01, overall_s=9), (), Cause.QUEUE_DEADLINE),
        (Limits(queue_s=0.01, first_token_s=0.02), ("admitted",), Cause.FIRST_TOKEN_DEADLINE),
        (Limits(queue_s=0.01, first_token_s=0.02, overall_s=0.03), ("admitted", "first"), Cause.OVERALL_DEADLINE),
    ],
)
async def test_each_clock_has_its_label(limits: Limits, steps: tuple[str, ...], cause: Cause) -> None:
    stop = Stop()
    clocks = Clocks(Deadlines(limits, time.monotonic()), stop, rpc_bound=False)
    if "admitted" in steps:
        clocks.admitted()
    if "first" in steps:
        clocks.first_token(time.monotonic())
    with pytest.raises(Stopped) as stopped:
        await stop.sleep(2)
    assert stopped.value.ending == Ending(FinishReason.DEADLINE_EXCEEDED, cause)


@pytest.mark.parametrize(
    ("limits", "recover_by", "ending"),
    [
        (Limits(inter_token_s=0.0), 60.0, Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_ENGINE)),
        (Limits(inter_token_s=60.0), 0.0, Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST)),
        (Limits(overall_s=0.0, inter_token_s=60.0), 0.0, Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE)),
    ],
)
async def test_without_a_decode_member_the_time_between_tokens_runs_here(
    limits: Limits, recover_by: float, ending: Ending
) -> None:
    """While a member decodes it watches that clock itself: here it must not run."""
    stop, now = Stop(), time.monotonic()
    clocks = Clocks(Deadlines(replace(limits, overall_s=None), now), stop, rpc_bound=False)
    clocks.admitted()
    clocks.first_token(now)
    await asyncio.sleep(0)
    assert stop.ending is None
    clocks.close()
    clocks = Clocks(Deadlines(limits, now), stop, rpc_bound=False)
    clocks.first_token(now)
    clocks.decode_lost(now, now + recover_by)
    with pytest.raises(Stopped):
        await stop.until(asyncio.get_running_loop().create_future())
    assert stop.ending == ending


async def test_a_seat_given_in_time_ends_the_wait_for_a_decode_member() -> None:
    stop, now = Stop(), time.monotonic()
    clocks = Clocks(Deadlines(Limits(inter_token_s=0.0), now), stop, rpc_bound=False)
    clocks.first_token(now)
    clocks.decode_lost(now, now)
    clocks.admitted()
    await asyncio.sleep(0)
    assert stop.ending is None


async def test_the_rpc_s_own_deadline_has_its_own_label() -> None:
    stop = Stop()
    Clocks(Deadlines(Limits(overall_s=0.0), time.monotonic()), stop, rpc_bound=True)
    with pytest.raises(Stopped) as stopped:
        await stop.sleep(2)
    assert stopped.value.ending.cause is Cause.RPC_DEADLINE


@pytest.mark.parametrize(
    ("remaining_s", "overall_s", "bound"), [(None, 600.0, False), (10.0, 9.95, True), (1.0, 1.0, True), (1000.0, 600.0, False)]
)
def test_the_overall_clock_is_cut_to_the_rpc_deadline(remaining_s: float | None, overall_s: float, bound: bool) -> None:
    limits, rpc_bound = with_rpc_deadline(Limits(1.0, 2.0, 3.0, 600.0), remaining_s, age_s=0.05)
    assert limits.overall_s == pytest.approx(overall_s, abs=0.01) and rpc_bound is bound
    assert (limits.queue_s, limits.first_token_s, limits.inter_token_s) == (1.0, 2.0, 3.0)


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(share=0.5, most=2.0, saved=0.0)
    assert not budget.take()
    for _ in range(100):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_b32_usage_is_the_union_of_both_caches_and_holds_without_an_end() -> None:
    progress = Progress(prompt_tokens=10, arrived_at=0.0, decode_cached_tokens=4)
    progress.prefill = PrefillDone(cached_tokens=8, sent_bytes=0, queue_s=0, compute_s=0, handover_s=0, exposed_s=0)
    progress.committed = Committed(0.0, 0.0, 0.0)
    progress.output(Output(b"x", 2, selected=(4, 5, 6), returned_tokens=2, text_bytes=1), 1.0)
    assert progress.usage() == Usage(10, 8, 3, 12, 2, 2)
    progress.discarded(Output(b"x", 3, selected=(7,), returned_tokens=1, text_bytes=1))
    progress.seat_end = SeatEnd(CANCEL, Usage(10, 0, 3, 12, 2, 3))
    assert progress.usage() == Usage(10, 8, 3, 12, 1, 2)


def record_ending(ending: Ending, *events: Event) -> RequestRecord:
    record = RequestRecord("r", "t", "m", "s", "f", 0, "router", "", 1.0)
    for event in events:
        record.advance(event, 2.0)
    record.ending = ending
    return record


TO_DRAINING = (Event.ACCEPTED, Event.TICKET, Event.SENT, Event.COMMITTED, Event.STOPPED)


@pytest.mark.parametrize(
    ("ending", "events", "code"),
    [
        (Ending(FinishReason.EOS), (*TO_DRAINING, Event.DELIVERED), None),
        (LATE, (*TO_DRAINING, Event.DELIVERED), None),
        (Ending(FinishReason.DEADLINE_EXCEEDED, Cause.RPC_DEADLINE), (*TO_DRAINING, Event.DELIVERED), "DEADLINE_EXCEEDED"),
        (Ending(FinishReason.DEADLINE_EXCEEDED, Cause.QUEUE_DEADLINE), (Event.ACCEPTED, Event.FAIL), "DEADLINE_EXCEEDED"),
        (CANCEL, (Event.CANCEL, Event.RELEASED), "CANCELLED"),
        (Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED), (Event.FAIL,), "INTERNAL"),
        (Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST), (Event.FAIL,), "UNAVAILABLE"),
        (Ending(FinishReason.SLOW_CONSUMER), (Event.FAIL,), "RESOURCE_EXHAUSTED"),
    ],
)
def test_the_table_of_endings(ending: Ending, events: tuple[Event, ...], code: str | None) -> None:
    record = record_ending(ending, *events)
    assert record.state in (State.FINISHED, State.CANCELLED, State.FAILED)
    status = status_of(record)
    assert (status.code.name if status else None) == code
    if ending.reason is FinishReason.MODEL_ERROR and status is not None:
        assert status.message == "internal error"


GOOD = ["--decode", "127.0.0.1:1", "--prefill", "127.0.0.1:2,dns:///pre.svc:3", "--redis-url", "redis://x"]


def test_settings_from_flags() -> None:
    settings = load_settings(RouterSettings, [*GOOD, "--queue-requests", "5", "--tenant-pages", "7"], {})
    assert settings.prefill_targets == ("127.0.0.1:2", "dns:///pre.svc:3") and settings.queue_requests == 5
    assert settings.admission_settings().budgets.tenant_pages == 7
    assert load_settings(RouterSettings, [*GOOD, "--prefill", "none"], {}).prefill_targets == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--decode", "nohost"], "decode"),
        (["--prefill", "a:99999"], "prefill"),
        (["--queue-requests", "0"], "queue"),
        (["--queue-clock-s", "301"], "max_queue_clock_s"),
        (["--cell", "a{b}"], "cell"),
        (["--buffer-bytes", "1000000"], "replay_bytes"),
        (["--detach-timeout-s", "4000"], "max_detach_timeout_s"),
        (["--redis-url", "redis-sentinel://a:26379,b:26379"], "redis_url: the name of the master is missing"),
    ],
)
def test_bad_settings_name_their_field(flags: list[str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_settings(RouterSettings, [*GOOD, *flags], {})


@pytest.mark.parametrize("target", ["", "host", ":1", "host:", "host:0", "host:x", "dns:///host"])
def test_bad_targets(target: str) -> None:
    with pytest.raises(BadTarget):
        check_target(target)


async def test_targets_are_resolved_and_an_absent_name_keeps_what_is_known() -> None:
    assert await resolve(("10.0.0.1:5",), frozenset(), 1.0) == {"10.0.0.1:5"}
    assert "127.0.0.1:7" in await resolve(("dns:///localhost:7",), frozenset(), 5.0)
    known = frozenset({"10.0.0.9:1"})
    assert await resolve(("dns:///no-such-host.invalid:1",), known, 5.0) == known


def test_the_rest_of_the_output_comes_with_the_end() -> None:
    last = decode_pb2.Output(response=b"bytes", next_sequence_no=9, selected_token_ids=[7, 8], text_bytes=3, returned_tokens=2)
    assert seat_end(decode_pb2.Ended(last=last)).last == Output(b"bytes", 9, (7, 8), 2, 3)
    assert seat_end(decode_pb2.Ended()).last is None

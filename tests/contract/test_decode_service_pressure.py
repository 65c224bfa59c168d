"""A decode member over the wire with too few pages: preempted seats go on, or end, like any other."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.waiting import until

KINDS = pytest.mark.parametrize("kind", ["recompute", "swap"])
#: 12 pages of 4 tokens; each of the seats below needs up to 9.
PAGES = 13
PROMPTS = [bytes([65 + seat] * 4) for seat in range(3)]
OUTPUT_TOKENS = 30


def settings(kind: str) -> dict[str, object]:
    return {"total_pages": PAGES, "reservation": "expected", "preemption": kind, "swap_pages": 16}


async def short_outputs(member: Member) -> None:
    """Enough outputs of one token, so that no more is expected of the next ones."""
    for _ in range(8):
        await (await member.open(b"!", max_output_tokens=1)).finish()


def preempted(books: Mapping[str, int]) -> int:
    return books["sequences"] - books["batch_places"]


async def three_long_outputs(member: Member) -> list[Seat]:
    """Their prompts are in before the first one has more than a token; the model is held inside a step."""
    await short_outputs(member)
    member.runner.gate.hold()
    seats = [await member.open(PROMPTS[0], max_output_tokens=OUTPUT_TOKENS)]
    for prompt in PROMPTS[1:]:
        await member.runner.gate.stopped()
        seats.append(await member.open(prompt, max_output_tokens=OUTPUT_TOKENS))
        await member.step_with()
    return seats


async def until_preempted(member: Member) -> list[Seat]:
    """Three long outputs, the last of which has no pages; the model is held inside a step."""
    seats = await three_long_outputs(member)
    for _ in range(OUTPUT_TOKENS):
        await member.runner.gate.stopped()
        asked = asyncio.create_task(member.books())
        await member.step_with()
        if preempted(await asked):
            await member.runner.gate.stopped()
            return seats
    raise AssertionError("nobody was preempted")


@KINDS
@pytest.mark.slow
async def test_outputs_are_the_undisturbed_ones(kind: str) -> None:
    async with decode_member(**settings(kind)) as member:
        seats = await three_long_outputs(member)
        member.runner.gate.release()
        for seat, prompt in zip(await asyncio.gather(*(seat.finish() for seat in seats)), PROMPTS, strict=True):
            assert seat.text == bytes(member.runner.said(prompt, OUTPUT_TOKENS)).decode()
            assert seat.ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
            assert seat.order.count("committed") == 1
        await member.assert_empty()

        async def told() -> bool:
            snapshot = member.service.snapshot
            return snapshot is not None and snapshot.preemptions[kind] >= 1

        await until(told, WAIT_S, "the preemptions are counted")


async def test_routers_are_told_of_preempted_seats_and_of_what_a_new_one_is_promised() -> None:
    async with decode_member(**settings("recompute")) as member:
        assert member.service.load().expected_output_tokens == 0, "all of max_output_tokens"
        await short_outputs(member)

        async def told() -> bool:
            return member.service.load().expected_output_tokens == 2

        await until(told, WAIT_S, "one token, and the margin, is what is expected")
        snapshot = member.service.snapshot
        assert snapshot is not None
        member.service.snapshot = replace(snapshot, load=replace(snapshot.load, waiting=1, preempted=2))
        load = member.service.load()
        assert (load.waiting_sequences, load.preempted_sequences) == (3, 2)


@KINDS
@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "router gone"])
async def test_b22_the_end_of_a_preempted_seat_releases_everything(kind: str, how: str) -> None:
    async with decode_member(**settings(kind)) as member:
        seats = await until_preempted(member)
        youngest = seats[-1]
        if how == "cancelled":
            await youngest.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        else:
            youngest.call.cancel()
        await member.until_noted()
        member.runner.gate.release()
        if how == "cancelled":
            await youngest.finish()
            assert youngest.ended.finish_reason == v1.FINISH_REASON_CANCELLED
            assert youngest.ended.released["pages"] == 0
            assert (youngest.ended.released.get("host_pages", 0) > 0) == (kind == "swap")
        for seat, prompt in list(zip(seats, PROMPTS, strict=True))[:-1]:
            await seat.finish()
            assert seat.text == bytes(member.runner.said(prompt, OUTPUT_TOKENS)).decode()
        await member.assert_empty()

"""A prefill member and a decode member in one process, each whole, over gRPC and the memory transport."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_transfer.memory import MemorySender
from member.process import open_member
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts, PrefillService
from rpc.application import Frame
from rpc.channels import internal_channel
from tandem.pools.v1 import decode_pb2, grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.decode_member import Member, Seat, decode_member
from tests.scripted import ScriptedRunner


class Prefill:
    """A running prefill member."""

    def __init__(self, frame: Frame, channel: Any) -> None:
        self.incarnation = frame.incarnation
        self.peer = grant_pb2.Peer(member=frame.name, incarnation=frame.incarnation, address=frame.address)
        self.stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.admin = member_pb2_grpc.AdminServiceStub(channel)


@contextlib.asynccontextmanager
async def prefill_member(member: Member) -> AsyncIterator[Prefill]:
    runner = ScriptedRunner(member.tokenizer.vocabulary_size, total_pages=300)
    settings = PrefillSettings(listen="127.0.0.1:0", transport="memory", metrics_port=None, drain_settle_s=0.0)
    parts = Parts(lambda: runner, lambda name, slabs: MemorySender(member.fabric, name, slabs), "scripted")
    process = open_member(lambda frame: PrefillService(frame, settings, parts), settings, "prefill")
    frame = await process.open()
    channel = internal_channel(frame.address)
    try:
        yield Prefill(frame, channel)
    finally:
        await channel.close()
        await process.drain()
        await process.close()


async def route(member: Member, prefill: Prefill, number: int, cancel: bool) -> Seat:
    """What a router does with one request."""
    prompt = tuple((number + index) % 200 + 1 for index in range(1 + number * 3 % 50))
    key = grant_pb2.AttemptKey(request_id=f"pair-{number}", attempt=1)
    seat = await member.open(prompt, prefill=prefill.peer, key=key, max_output_tokens=12)
    granted = await seat.until("granted")
    request = prefill_pb2.PrefillRequest(
        key=key,
        model_snapshot=member.runner.layout.model_snapshot,
        prompt_token_ids=prompt,
        grant=granted.grant,
        incarnation=prefill.incarnation,
    )
    call = prefill.stub.Prefill(request)
    if cancel:
        await seat.send(cancel=decode_pb2.CancelSeat(reason="cancelled"))
    kinds = [response.WhichOneof("event") async for response in call]
    await seat.finish()
    if cancel:
        assert seat.ended.cause == "client_cancel"
    else:
        assert kinds[-1] == "committed"
        assert seat.text == bytes(member.runner.said(prompt, 12)).decode()
    return seat


@pytest.mark.slow
async def test_prompts_go_from_one_to_the_other_and_cancels_meet_writes_in_flight() -> None:
    async with decode_member(total_pages=800, max_sequences=64) as member, prefill_member(member) as prefill:
        await asyncio.gather(*(route(member, prefill, number, number % 4 == 3) for number in range(32)))
        await member.assert_empty()
        found = await prefill.admin.Check(member_pb2.CheckRequest())
        assert list(found.faults) == []
        assert found.books["jobs"] == 0

"""A prefill member and a decode member in one process, each whole, over gRPC and the memory transport."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.runner import Runner
from kv_transfer.memory import MemorySender
from member.process import open_member
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts, PrefillService
from rpc.application import Frame
from rpc.channels import internal_channel
from tandem.pools.v1 import decode_pb2, grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.decode_member import Member, Seat, decode_member
from tests.engine import tiny_models
from tests.reference import greedy
from tests.scripted import ScriptedRunner


class Prefill:
    """A running prefill member."""

    def __init__(self, frame: Frame, channel: Any) -> None:
        self.incarnation = frame.incarnation
        self.peer = grant_pb2.Peer(member=frame.name, incarnation=frame.incarnation, address=frame.address)
        self.stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.admin = member_pb2_grpc.AdminServiceStub(channel)


@contextlib.asynccontextmanager
async def prefill_member(member: Member, runner: Runner | None = None) -> AsyncIterator[Prefill]:
    """With a script like the decode member's unless a runner is given."""
    runner = runner or ScriptedRunner(member.tokenizer.vocabulary_size, total_pages=300, window=member.runner.window)
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


def call(
    prefill: Prefill, snapshot: str, key: grant_pb2.AttemptKey, prompt: Sequence[int], grant: grant_pb2.Grant
) -> AsyncIterator[prefill_pb2.PrefillResponse]:
    """The prompt goes to the prefill member, with a grant."""
    return prefill.stub.Prefill(
        prefill_pb2.PrefillRequest(
            key=key, model_snapshot=snapshot, prompt_token_ids=prompt, grant=grant, incarnation=prefill.incarnation
        )
    )


async def route(member: Member, prefill: Prefill, number: int, cancel: bool) -> Seat:
    """What a router does with one request."""
    prompt = tuple((number + index) % 200 + 1 for index in range(1 + number * 3 % 50))
    key = grant_pb2.AttemptKey(request_id=f"pair-{number}", attempt=1)
    seat = await member.open(prompt, prefill=prefill.peer, key=key, max_output_tokens=12)
    granted = await seat.until("granted")
    responses = call(prefill, member.runner.layout.model_snapshot, key, prompt, granted.grant)
    if cancel:
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
    kinds = [response.WhichOneof("event") async for response in responses]
    await seat.finish()
    if cancel:
        assert seat.ended.cause == "client_cancel"
    else:
        assert kinds[-1] == "committed"
        assert seat.text == bytes(member.runner.said(prompt, 12)).decode()
    return seat


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 10])
async def test_prompts_go_from_one_to_the_other_and_cancels_meet_writes_in_flight(window: int | None) -> None:
    """With a window there is a second KV group, of whose pages only those go over that the first token still sees."""
    async with (
        decode_member(total_pages=800, max_sequences=64, window=window) as member,
        prefill_member(member) as prefill,
    ):
        await asyncio.gather(*(route(member, prefill, number, number % 4 == 3) for number in range(32)))
        await member.assert_empty()
        found = await prefill.admin.Check(member_pb2.CheckRequest())
        assert list(found.faults) == []
        assert found.books["jobs"] == 0


@pytest.mark.parametrize("theirs", [None, 12])
async def test_b56_groups_that_differ_in_one_window_exchange_nothing(theirs: int | None) -> None:
    """Another window, or a group more: as many bytes in each page, and the bytes mean something else."""
    async with decode_member(window=10) as member:
        runner = ScriptedRunner(member.tokenizer.vocabulary_size, window=theirs)
        async with prefill_member(member, runner) as prefill:
            key = grant_pb2.AttemptKey(request_id="unlike", attempt=1)
            seat = await member.open((1, 2, 3), prefill=prefill.peer, key=key)
            granted = await seat.until("granted")
            events = [event async for event in call(prefill, "scripted-model", key, (1, 2, 3), granted.grant)]
            assert [event.failed.cause for event in events] == ["layout_mismatch"]
            assert member.runner.layout.fingerprint in events[0].failed.detail
            assert runner.layout.fingerprint in events[0].failed.detail
            await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
            await seat.finish()
        await member.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "windows"), [("gemma3", (None, 12)), ("deepseek-v3", (None,))])
async def test_a_model_of_every_kind_of_group_says_after_a_hand_over_what_the_reference_says(
    tmp_path: Path, variant: str, windows: tuple[int | None, ...]
) -> None:
    """Random weights: prompts shorter and longer than a window of 12 tokens go from one member to the other."""
    reference = tiny_models.build(variant, vocab_size=120)
    ref = tiny_models.save(reference, tmp_path)
    load = functools.partial(tiny_models.load, ref, page_tokens=4, total_pages=60)
    runner = load()
    assert tuple(group.window for group in runner.layout.groups) == windows
    async with decode_member(model=runner) as member, prefill_member(member, load()) as prefill:
        written = 0
        for length in (1, 5, 11, 12, 13, 40):
            prompt = tuple((7 * index + length) % 120 for index in range(length))
            key = grant_pb2.AttemptKey(request_id=f"model-{length}", attempt=1)
            message = {"prefill": prefill.peer, "key": key, "max_output_tokens": 20, "model_snapshot": ref.snapshot}
            seat = await member.open(prompt, **message)
            granted = await seat.until("granted")
            sent = [sum(page > 0 for page in group.page_ids) for group in granted.grant.groups]
            gone = [0 if window is None else max(0, length + 1 - window) // 4 for window in windows]
            assert sent == [-(-length // 4) - left for left in gone]
            events = [event async for event in call(prefill, ref.snapshot, key, prompt, granted.grant)]
            assert events[-1].WhichOneof("event") == "committed"
            written += events[-1].committed.sent_bytes
            await seat.finish()
            assert [token for output in seat.outputs for token in output.selected_token_ids] == greedy(reference, prompt, 20)
        # Pages that the window has left count on neither side.
        assert member.frame.metrics.registry.get_sample_value("tandem_decode_received_bytes_total") == written
        await member.assert_empty()
        found = await prefill.admin.Check(member_pb2.CheckRequest())
        assert list(found.faults) == []

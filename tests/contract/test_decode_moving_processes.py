"""Sequences move between two decode members in processes of their own, over NIXL and TCP, with the default model."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpc.channels import internal_channel
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc, grant_pb2, member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2
from tests.decode_member import Seat
from tests.model_files import default_model
from tests.waiting import until

pytestmark = pytest.mark.slow

READY_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "dtype": "float32",
    "total-pages": 128,
    "threads": 1,
    "net-devices": "lo",
    "drain-settle-s": 0,
    "drain-timeout-s": 30,
    "drain-retry-s": 0.1,
    "drain-call-s": 0.5,
}


@dataclass
class Child:
    """A decode member's process."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    peer: grant_pb2.Peer
    snapshot: str = ""
    stub: Any = field(init=False)
    admin: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        self.admin = member_pb2_grpc.AdminServiceStub(self.channel)

    async def open(self, prompt: Sequence[int], request_id: str, attempt: int = 1, **changes: Any) -> Seat:
        """A seat, as a router opens it."""
        fields: dict[str, Any] = {
            "key": grant_pb2.AttemptKey(request_id=request_id, attempt=attempt),
            "model_snapshot": self.snapshot,
            "incarnation": self.peer.incarnation,
            "prompt_token_ids": prompt,
            "sampling": inference_pb2.SamplingParams(temperature=1.0, seed=7),
            "stop": inference_pb2.StopParams(ignore_eos=True),
            "first_sequence_no": 1,
        }
        seat = Seat(self.stub.Decode(), request_id)
        await seat.send(open=decode_pb2.Open(**{**fields, **changes}))
        return seat

    async def at_rest(self) -> None:
        """Nothing is held any more, and everything adds up."""

        async def empty() -> bool:
            found = await self.admin.Check(member_pb2.CheckRequest())
            assert list(found.faults) == []
            return bool(
                found.books["pages_free"] + found.books["pages_cached"] == found.books["pages_total"]
                and not found.books["grants_open"]
            )

        await until(empty, 20.0, "everything is given back")


@contextlib.asynccontextmanager
async def child(name: str) -> AsyncIterator[Child]:
    """A member from its start to its end."""
    read_fd, write_fd = os.pipe()
    flags = [f"--{flag}={value}" for flag, value in {**FLAGS, "name": name, "ready-fd": write_fd}.items()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "decode_svc", f"--model={default_model().path}", *flags),
        pass_fds=[write_fd],
        env={**environment, "UCX_TCP_USER_TIMEOUT": "3s"},
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            async with asyncio.timeout(READY_S):
                ready = json.loads(await asyncio.to_thread(pipe.readline))
        channel = internal_channel(ready["address"])
        watch = member_pb2_grpc.MemberServiceStub(channel).Watch(member_pb2.WatchRequest(router="router"))
        info = (await watch.read()).info
        watch.cancel()
        yield Child(process, channel, info.peer, info.model_snapshot)
        await channel.close(None)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def paused(seat: Seat, outputs: int) -> None:
    """Some outputs, then PauseSeat and its answer."""
    for _ in range(outputs):
        await seat.until("output")
    await seat.send(pause=decode_pb2.PauseSeat())
    assert (await seat.until("paused")).pushable


async def goes_on(seat: Seat, source: Child, target: Child, prompt: Sequence[int], most: int) -> Seat:
    """The seat at the target, up to its grant."""
    there = await target.open(
        prompt,
        seat.request_id,
        2,
        prefill=source.peer,
        moved=True,
        output_token_ids=[*seat.told, *seat.paused.selected_token_ids],
        sent_text_bytes=sum(output.text_bytes for output in seat.outputs),
        returned_tokens=sum(output.returned_tokens for output in seat.outputs),
        first_sequence_no=seat.outputs[-1].next_sequence_no,
        max_output_tokens=most,
    )
    await there.until("granted")
    return there


async def test_sequences_move_over_nixl_as_the_source_drains_and_say_what_they_would_have_said() -> None:
    prompts = [tuple((7 * index + number) % 400 + 50 for index in range(length)) for number, length in enumerate((480, 33))]
    async with child("source") as source, child("target") as target:
        alone = [await target.open(prompt, f"alone-{n}", max_output_tokens=48) for n, prompt in enumerate(prompts)]
        for seat in alone:
            await seat.finish()
        seats = [await source.open(prompt, f"moved-{n}", max_output_tokens=48) for n, prompt in enumerate(prompts)]
        for seat in seats:
            await seat.until("output")
        source.process.send_signal(signal.SIGTERM)
        joined = []
        for seat, prompt in zip(seats, prompts, strict=True):
            await paused(seat, outputs=3)
            there = await goes_on(seat, source, target, prompt, most=48)
            await seat.send(push=decode_pb2.PushSeat(grant=there.granted.grant))
            await there.until("committed")
            await seat.send(cancel=decode_pb2.CancelSeat(reason="moved"))
            await seat.finish()
            joined.append(there)
        assert await source.process.wait() == 0, "the drain ends when all have moved"
        for whole, seat, there in zip(alone, seats, joined, strict=True):
            await there.finish()
            assert [*seat.told, *seat.paused.selected_token_ids, *there.told] == whole.told
            assert seat.text + there.text == whole.text
        await target.at_rest()


@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_member_that_is_killed_while_pages_are_written_takes_nothing_with_it(victim: str) -> None:
    prompt = tuple(index % 400 + 50 for index in range(480))
    async with child("source") as source, child("target") as target:
        seat = await source.open(prompt, "killed", max_output_tokens=200)
        await paused(seat, outputs=3)
        there = await goes_on(seat, source, target, prompt, most=200)
        # The target stands still, so the push can not end before the kill.
        target.process.send_signal(signal.SIGSTOP)
        await seat.send(push=decode_pb2.PushSeat(grant=there.granted.grant))

        async def writing() -> bool:
            return (await source.admin.Check(member_pb2.CheckRequest())).books["pushes_in_flight"] > 0

        await until(writing, 10.0, "a write is under way")
        if victim == "source":
            source.process.kill()
            await source.process.wait()
            target.process.send_signal(signal.SIGCONT)
            await there.send(prefill_lost=decode_pb2.PrefillLost(cause="prefill_lost", drained=False))
            await there.finish()
            assert there.ended.cause == "prefill_lost"
            await target.at_rest()
            return
        target.process.kill()
        failed = await seat.until("pushed")
        assert (failed.ok, failed.cause) == (False, "transfer_failed")
        await seat.send(cancel=decode_pb2.CancelSeat(reason="moved"))
        await seat.finish()
        await source.at_rest()

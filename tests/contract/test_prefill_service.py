"""A prefill member on a real gRPC server, with the scripted model and the in-memory transport: what lands, how calls end."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio
import pytest

from engine.landing import LandingRows
from engine.layout import pages_for
from engine.slab import SlabMemory
from kv_transfer.grants import Committed, ReaderBook
from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.offer import Grant, GrantPages, Peer, Slab, grant_to_proto
from lifecycle.record import AttemptKey
from member.process import open_member
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts, PrefillService
from rpc.application import Frame
from rpc.serving import Process
from tandem.pools.v1 import grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.scripted import ScriptedRunner
from tests.waiting import until

pytestmark = pytest.mark.slow

VOCABULARY = 300
WAIT_S = 10.0


def registered(slab: SlabMemory) -> Slab:
    return Slab(slab.address, slab.size_bytes, slab.unit_bytes)


@dataclass(slots=True)
class Reader:
    """The decode side, by hand: memory of its own, grants, notices."""

    fabric: MemoryFabric
    runner: ScriptedRunner = field(default_factory=lambda: ScriptedRunner(VOCABULARY))
    landing: LandingRows = field(default_factory=lambda: LandingRows(4, VOCABULARY))
    book: ReaderBook = field(default_factory=ReaderBook)
    receiver: MemoryReceiver = field(init=False)
    pages: int = 0

    def __post_init__(self) -> None:
        slabs = [registered(slab) for slab in (*self.runner.slabs, self.landing.slab)]
        self.receiver = MemoryReceiver(self.fabric, "decode-0", slabs)

    def offer(self, prompt: list[int], writer: str, row: int = 0) -> Grant:
        count = pages_for(len(prompt), self.runner.page_tokens)
        first = 1 + self.pages
        self.pages += count
        grant = Grant(
            grant_id=secrets.token_hex(16),
            key=AttemptKey("request", 1),
            decode=Peer("decode-0", "incarnation", "nowhere:1"),
            layout_fingerprint=self.runner.layout.fingerprint,
            first_position=0,
            token_count=len(prompt),
            groups=(GrantPages(tuple(range(first, first + count)), (1,) * count),),
            landing_row=row,
            endpoint=self.receiver.endpoint(writer),
            expires_after_s=30.0,
        )
        self.book.offer(grant, Peer("prefill-0", writer, "nowhere:2"), 0.0)
        return grant

    def arrived(self) -> list[object]:
        return [self.book.arrived(writer, notice, 0.0) for writer, notice in self.receiver.poll()]

    def received(self, grant: Grant) -> list[int]:
        pages = list(grant.groups[0].page_ids)
        stored = self.runner.slab_tensors[pages].flatten()[: grant.token_count].tolist()
        return [value - 1 for value in stored]


@dataclass(slots=True)
class World:
    """A running member and everything round it."""

    frame: Frame
    fabric: MemoryFabric
    runner: ScriptedRunner
    reader: Reader
    stub: prefill_pb2_grpc.PrefillServiceStub
    admin: member_pb2_grpc.AdminServiceStub
    process: Process
    stub_channel: grpc.aio.Channel
    ended: bool = False

    def request(self, prompt: list[int], grant: Grant, **changes: object) -> prefill_pb2.PrefillRequest:
        fields = {
            "key": grant_pb2.AttemptKey(request_id="request", attempt=1),
            "model_snapshot": self.runner.layout.model_snapshot,
            "prompt_token_ids": prompt,
            "grant": grant_to_proto(grant),
            "incarnation": self.frame.incarnation,
        }
        return prefill_pb2.PrefillRequest(**{**fields, **changes})

    async def prefill(self, request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillResponse]:
        return [event async for event in self.stub.Prefill(request, timeout=WAIT_S)]

    async def drain(self, grant: Grant, incarnation: str = "") -> int:
        request = prefill_pb2.DrainRequest(
            grant_id=bytes.fromhex(grant.grant_id), incarnation=incarnation or self.frame.incarnation
        )
        return (await self.stub.Drain(request, timeout=WAIT_S)).state

    def waiting_commands(self) -> int:
        text = self.frame.metrics.text()
        return int(
            float(next(line for line in text.splitlines() if line.startswith("tandem_prefill_inbox_messages ")).split()[1])
        )

    async def commands_wait(self, count: int) -> None:
        """Until so many commands wait for an engine that is held inside a step."""

        async def there() -> bool:
            return self.waiting_commands() >= count

        await until(there, WAIT_S, f"{count} commands wait")

    async def books(self) -> dict[str, int]:
        answer = await self.admin.Check(member_pb2.CheckRequest(), timeout=WAIT_S)
        assert list(answer.faults) == []
        return dict(answer.books)

    async def at_rest(self) -> None:
        async def nothing_held() -> bool:
            books = await self.books()
            return not any(count for name, count in books.items() if name not in ("pages_total", "pages_free", "pages_cached"))

        await until(nothing_held, WAIT_S, "at rest")


@asynccontextmanager
async def member(**settings: object) -> AsyncIterator[World]:
    fabric = MemoryFabric()
    runner = ScriptedRunner(VOCABULARY)
    parts = Parts(lambda: runner, lambda name, slabs: MemorySender(fabric, name, slabs), "scripted")
    chosen = PrefillSettings(
        **{"transport": "memory", "metrics_port": None, "max_step_tokens": 8, "drain_settle_s": 0, **settings}
    )
    process = open_member(lambda frame: PrefillService(frame, chosen, parts), chosen, "prefill")
    try:
        frame = await process.open()
        async with grpc.aio.insecure_channel(frame.address) as channel:
            stub, admin = prefill_pb2_grpc.PrefillServiceStub(channel), member_pb2_grpc.AdminServiceStub(channel)
            world = World(frame, fabric, runner, Reader(fabric), stub, admin, process, channel)
            yield world
    finally:
        runner.gate.release()
        if not world.ended:
            await process.drain()
        await process.close()


def kinds(events: list[prefill_pb2.PrefillResponse]) -> list[str]:
    return [event.WhichOneof("event") for event in events]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 21, 64])
async def test_prompt_and_logits_land_where_they_were_granted(length: int) -> None:
    """B26: lengths round every page and chunk border, mapped by token position."""
    prompt = [(7 * n + length) % 250 for n in range(length)]
    async with member() as world:
        grant = world.reader.offer(prompt, world.frame.incarnation, row=2)
        events = await world.prefill(world.request(prompt, grant))
        assert kinds(events)[0] == "accepted" and kinds(events)[-1] == "committed" and set(kinds(events)[1:-1]) <= {"progress"}
        outcomes = world.reader.arrived()
        assert isinstance(outcomes[-1], Committed)
        assert world.reader.received(grant) == prompt
        assert int(world.reader.landing.row(2).argmax()) == world.runner.next_token(tuple(prompt))
        committed = events[-1].committed
        assert committed.sent_bytes > 0 and committed.compute_s >= 0 and committed.handover_s >= committed.exposed_s >= 0
        await world.at_rest()


async def test_many_prompts_at_once_are_packed_and_each_lands_in_its_own_pages() -> None:
    async with member() as world:
        prompts = [[n * 16 + i for i in range(3 + n)] for n in range(6)]
        prompts[0] = [i % 250 for i in range(41)]  # its last chunk is one token, which leaves room for others
        grants = [world.reader.offer(prompt, world.frame.incarnation, row=n % 4) for n, prompt in enumerate(prompts)]
        requests = [world.request(prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
        world.runner.gate.hold()
        calls = [asyncio.create_task(world.prefill(requests[0]))]
        await world.runner.gate.entered(1)
        calls += [asyncio.create_task(world.prefill(request)) for request in requests[1:]]
        await world.commands_wait(1)
        world.runner.gate.release()
        ends = await asyncio.gather(*calls)
        assert {kinds(events)[-1] for events in ends} == {"committed"}
        assert [world.reader.received(grant) for grant in grants] == prompts
        assert any(batch.scheduled_sequences > 1 for batch in world.runner.batches)
        await world.at_rest()


async def test_ending_the_call_stops_before_the_next_chunk() -> None:
    async with member() as world:
        prompt = list(range(64))
        grant = world.reader.offer(prompt, world.frame.incarnation)
        world.runner.gate.hold()
        call = world.stub.Prefill(world.request(prompt, grant), timeout=WAIT_S)
        await world.runner.gate.entered(1)
        call.cancel()
        answer = asyncio.create_task(world.drain(grant))
        await world.commands_wait(2)
        world.runner.gate.release()
        assert await answer == prefill_pb2.DRAIN_STATE_DRAINED
        await world.at_rest()
        assert len(world.runner.batches) <= 2


async def test_drain_answers_only_when_the_writes_in_flight_have_ended_and_nothing_is_written_after_it() -> None:
    """B02: the target's pages may be reused once Drain was answered."""
    async with member() as world:
        prompt = list(range(64))
        grant = world.reader.offer(prompt, world.frame.incarnation)
        world.fabric.freeze(grant.endpoint.agent)
        call = asyncio.create_task(world.prefill(world.request(prompt, grant)))

        async def writing() -> bool:
            return (await world.books())["pushes_in_flight"] > 0

        await until(writing, WAIT_S, "a write in flight")
        draining = asyncio.create_task(world.drain(grant))
        books = await world.books()
        assert not draining.done() and books["pages_owned"] > 0
        world.fabric.freeze(grant.endpoint.agent, False)
        assert await draining in (prefill_pb2.DRAIN_STATE_DRAINED, prefill_pb2.DRAIN_STATE_COMMITTED)
        before = world.reader.runner.slab_tensors.clone()
        await call
        await world.at_rest()
        assert bool((world.reader.runner.slab_tensors == before).all())


async def test_drain_of_unknown_and_foreign_grants() -> None:
    async with member() as world:
        prompt = [1, 2, 3]
        grant = world.reader.offer(prompt, world.frame.incarnation)
        assert await world.drain(grant, incarnation="another") == prefill_pb2.DRAIN_STATE_WRONG_INCARNATION
        assert await world.drain(grant) == prefill_pb2.DRAIN_STATE_DRAINED
        assert await world.drain(grant) == prefill_pb2.DRAIN_STATE_DRAINED
        events = await world.prefill(world.request(prompt, grant))
        assert kinds(events) == ["failed"] and events[0].failed.cause == "revoked"
        assert world.reader.arrived() == []
        done = world.reader.offer(prompt, world.frame.incarnation)
        assert kinds(await world.prefill(world.request(prompt, done)))[-1] == "committed"
        assert await world.drain(done) == prefill_pb2.DRAIN_STATE_COMMITTED
        await world.at_rest()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"incarnation": "another"}, "wrong_incarnation"),
        ({"model_snapshot": "another"}, "unknown_model"),
        ({"adapter": grant_pb2.Adapter(name="polite", identity="aa")}, "unknown_adapter"),
        ({"prompt_token_ids": []}, "bad_grant"),
        ({"prompt_token_ids": [1, 2, 3, 4]}, "bad_grant"),
        ({"remaining_s": 0.0}, "deadline"),
    ],
)
async def test_refusals_are_told_at_once(changes: dict[str, object], cause: str) -> None:
    async with member() as world:
        grant = world.reader.offer([1, 2, 3], world.frame.incarnation)
        events = await world.prefill(world.request([1, 2, 3], grant, **changes))
        assert events[-1].failed.cause == cause and events[-1].failed.detail
        await world.at_rest()
        assert world.runner.batches == []


async def test_an_unlike_layout_is_refused_with_both_named() -> None:
    async with member() as world:
        grant = world.reader.offer([1, 2, 3], world.frame.incarnation)
        request = world.request([1, 2, 3], grant)
        request.grant.layout_fingerprint = "ff" * 16
        (event,) = await world.prefill(request)
        assert event.failed.cause == "layout_mismatch" and event.failed.retryable, "another member may have this layout"
        assert "ff" * 16 in event.failed.detail and world.runner.layout.fingerprint in event.failed.detail


async def test_a_pool_with_weights_of_another_kind_is_refused_and_the_log_names_both(caplog: pytest.LogCaptureFixture) -> None:
    async with member() as world:
        grant = world.reader.offer([1, 2, 3], world.frame.incarnation)
        request = world.request([1, 2, 3], grant)
        request.grant.layout_fingerprint = replace(world.runner.layout, weight_quantisation="int8").fingerprint
        with caplog.at_level(logging.WARNING, "prefill"):
            (event,) = await world.prefill(request)
        assert event.failed.cause == "layout_mismatch"
        for told in (event.failed.detail, caplog.text):
            assert "weight_quantisation 'int8' there and 'off' here" in told
        await world.at_rest()
        assert world.runner.batches == []


async def test_a_failing_model_fails_its_prompt_and_the_member_goes_on() -> None:
    async with member() as world:
        world.runner.fail_when = lambda history: history[0] == 9
        bad, good = [9, 1], [8, 1]
        grants = [world.reader.offer(prompt, world.frame.incarnation) for prompt in (bad, good)]
        events = await world.prefill(world.request(bad, grants[0]))
        assert events[-1].failed.cause == "model_error"
        assert kinds(await world.prefill(world.request(good, grants[1])))[-1] == "committed"
        await world.at_rest()


async def test_a_full_queue_refuses_and_names_the_limit() -> None:
    async with member(max_jobs=1) as world:
        prompts = [[1] * 40, [2] * 3]
        grants = [world.reader.offer(prompt, world.frame.incarnation) for prompt in prompts]
        world.runner.gate.hold()
        first = asyncio.create_task(world.prefill(world.request(prompts[0], grants[0])))
        await world.runner.gate.entered(1)
        second = asyncio.create_task(world.prefill(world.request(prompts[1], grants[1])))
        await world.commands_wait(1)
        world.runner.gate.step()
        (event,) = await second
        assert event.failed.cause == "queue_full" and "max_jobs" in event.failed.detail and event.failed.retryable
        world.runner.gate.release()
        assert kinds(await first)[-1] == "committed"
        await world.at_rest()


async def test_shutting_down_finishes_what_runs_and_refuses_new_work() -> None:
    async with member() as world:
        prompt = list(range(40))
        grant, late = (world.reader.offer(prompt, world.frame.incarnation) for _ in range(2))
        world.runner.gate.hold()
        running = asyncio.create_task(world.prefill(world.request(prompt, grant)))
        await world.runner.gate.entered(1)
        world.ended = True
        draining = asyncio.create_task(world.process.drain())
        await world.commands_wait(1)  # the member was told to close
        refused = asyncio.create_task(world.prefill(world.request(prompt, late)))
        await world.commands_wait(2)
        world.runner.gate.release()
        assert kinds(await running)[-1] == "committed"
        (event,) = await refused
        assert event.failed.cause == "draining" and event.failed.retryable
        assert await draining == 0

"""Plays a plan against a cell: its clients run, its faults strike, and each request is judged."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import grpc
import grpc.aio

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tests.chaos.cell import STORE, ChaosCell
from tests.chaos.clients import PATIENCE_S, Client, Story
from tests.chaos.faults import strike
from tests.chaos.http_answers import HttpStory
from tests.chaos.http_clients import AnyClient, HttpClient
from tests.chaos.judge import ATTACHES, judge
from tests.chaos.judge_http import judge_http
from tests.chaos.plan import Door, Kind, Manner, Order, Plan
from tests.chaos.undisturbed import Expected, Undisturbed
from tests.e2e.cells import fresh_id
from tests.waiting import until

#: For a record to become terminal after everything has healed.
RECORD_S = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """at_once: clients at a time, 0 is all of them. patience_s: for everything that one of them does."""

    at_once: int = 0
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one client. wrong: why that cannot be right; empty: it is. refusals: how often it was told to come back."""

    outcome: str
    tokens: int
    wrong: str = ""
    refusals: int = 0


async def play(
    cell: ChaosCell, undisturbed: Undisturbed, plan: Plan, tokenizer: Tokenizer, pace: Pace | None = None
) -> list[Judged]:
    """Run all clients of the plan, all at a time unless `pace` says otherwise, and its faults. At the end every process is ready.

    The cell is at rest and undisturbed knows the plan's shapes.
    """
    pace = pace or Pace()
    expected = [undisturbed[order.shape] for order in plan.orders]
    forgetful = plan.hits({Kind.KILL, Kind.TERM}, STORE)

    def client(order: Order, request_id: str, turned: bool = False) -> AnyClient:
        routers, doors = (pair[::-1] if turned else pair for pair in (cell.routers, cell.doors))
        if order.door is not Door.GRPC:
            return HttpClient(order, request_id, tokenizer, doors, routers, pace.patience_s)
        request = order.shape.request(request_id, tokenizer)
        return Client(order, request, routers, attaches=ATTACHES, forgetful=forgetful, patience_s=pace.patience_s)

    clients = [client(order, fresh_id(f"chaos-{plan.seed}")) for order in plan.orders]
    twins = [client(one.order, one.story.request_id, turned=True) for one in clients if one.order.manner is Manner.TWICE]
    await _run(cell, plan, clients, twins, expected, asyncio.Semaphore(pace.at_once) if pace.at_once else nullcontext())
    for process in cell.processes.values():
        await process.become_ready()
    by_id = {one.story.request_id: what for one, what in zip(clients, expected, strict=True)}
    judged = []
    for one in (*clients, *twins):
        story = one.story
        try:
            record = await _record(cell, story, forgetful=forgetful)
            outcome = _judge(plan, one, by_id[story.request_id], record)
            judged.append(Judged(outcome, story.tokens, refusals=sum(call.refused for call in story.connections)))
        except AssertionError as wrong:
            judged.append(Judged("wrong", story.tokens, f"{story.request_id} ({one.order}): {wrong}\n{_told(story)}"))
    return judged


def _judge(plan: Plan, client: AnyClient, expected: Expected, record: pb.RequestRecord | None) -> str:
    if isinstance(client, HttpClient):
        return f"{judge_http(plan, client.order, client.story, expected, record)} by HTTP"
    return judge(plan, client.order, client.story, expected, record)


async def _run(
    cell: ChaosCell,
    plan: Plan,
    clients: Sequence[AnyClient],
    twins: Sequence[AnyClient],
    expected: Sequence[Expected],
    gate: AbstractAsyncContextManager[None],
) -> None:
    # A twin asks while its first does: both pass the gate together.
    others = {twin.story.request_id: twin for twin in twins}

    async def pair(client: AnyClient) -> None:
        async with gate:
            twin = others.get(client.story.request_id)
            await asyncio.gather(client.run(), *([twin.run()] if twin else []))

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(pair(client))
        for fault in plan.faults:
            tasks.create_task(strike(cell, fault, clients, expected))


async def _record(cell: ChaosCell, story: Story | HttpStory, *, forgetful: bool) -> pb.RequestRecord | None:
    """The record once it is terminal, from both routers alike; None when there is none."""
    found: list[pb.RequestRecord | None] = []
    for address in cell.routers:
        async with connect(address) as stub:
            last: dict[str, object] = {}

            async def ended(stub=stub, last=last) -> bool:
                try:
                    record = (await stub.Get(pb.GetRequest(request_id=story.request_id), timeout=5)).record
                except grpc.aio.AioRpcError as error:
                    last["record"] = None if error.code() is grpc.StatusCode.NOT_FOUND else error.code()
                    return error.code() is grpc.StatusCode.NOT_FOUND
                last["record"] = record
                return record.state in (pb.REQUEST_STATE_FINISHED, pb.REQUEST_STATE_CANCELLED, pb.REQUEST_STATE_FAILED)

            try:
                await until(ended, RECORD_S, "the record is terminal")
            except AssertionError as error:
                raise AssertionError(f"at {address} the record is not terminal: {last['record']}") from error
            found.append(last["record"])  # type: ignore[arg-type]
    # After the store has lost its memory only the router that served a request may know how it ended.
    one, other = found
    assert one == other or (forgetful and None in found), f"the routers know two records: {found}"
    return one if one is not None else other


def _told(story: Story | HttpStory) -> str:
    """What a client got, for people."""
    if isinstance(story, HttpStory):
        calls = "\n".join(f"  {call}" for call in story.connections)
        return f"{story.tokens} tokens\n{calls}\n{story.told} {story.usage}"
    connections = "\n".join(f"  {one}" for one in story.connections)
    return f"{len(story.events)} events, {story.tokens} tokens\n{connections}\n{story.completed}"

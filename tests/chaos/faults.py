"""Does to a cell what a plan says, at the moment it says, and undoes it."""

import asyncio
import signal
from collections.abc import Sequence

import grpc
import grpc.aio

from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tests.chaos.cell import MEMBER_DRAIN_S, ChaosCell
from tests.chaos.http_clients import AnyClient
from tests.chaos.plan import Door, Fault, Kind, Phase
from tests.chaos.undisturbed import Expected
from tests.waiting import LOOK_AGAIN_S, until

#: For the watched request to come to a phase; then the fault strikes all the same.
PHASE_S = 30.0
#: For a process to end after SIGTERM: its drain, and closing what is open.
END_S = MEMBER_DRAIN_S + 40.0
#: A process that was asked to end: in order, or with its drain cut.
ENDINGS = (0, 75)
_BEFORE_PREFILLING = (pb.REQUEST_STATE_CREATED, pb.REQUEST_STATE_QUEUED, pb.REQUEST_STATE_ADMITTED)


async def strike(cell: ChaosCell, fault: Fault, clients: Sequence[AnyClient], expected: Sequence[Expected]) -> None:
    """Wait for the fault's moment, do it, undo it. Processes that were restarted may still be loading at the end."""
    client = clients[fault.watched]
    await _moment(cell, fault.phase, client, expected[fault.watched])
    await asyncio.sleep(fault.delay_s)
    if fault.kind in (Kind.CUT, Kind.UNPLUG):
        await _break_network(cell, fault)
        return
    process = cell[fault.target[0]]
    if fault.kind is Kind.FREEZE:
        process.send(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        process.send(signal.SIGCONT)
        return
    process.send(signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGTERM)
    status = await process.ended(END_S)
    if fault.kind is Kind.TERM:
        assert status in ENDINGS, f"{process.name} ended with {status} after SIGTERM"
    await asyncio.sleep(fault.seconds)
    process.start()


async def _break_network(cell: ChaosCell, fault: Fault) -> None:
    network = cell.network
    assert network is not None
    if fault.kind is Kind.CUT:
        network.cut(fault.target)
    else:
        network.unplug(fault.target[0])
    await asyncio.sleep(fault.seconds)
    network.heal()


async def _moment(cell: ChaosCell, phase: Phase, client: AnyClient, expected: Expected) -> None:
    """When the client's request is in the phase, or has ended, or has not come to it within PHASE_S."""
    await client.asked.wait()
    tokens = {Phase.FIRST_TOKEN: 1, Phase.LATE: 2 * expected.returned_tokens // 3, Phase.LAST_TOKEN: expected.returned_tokens - 1}

    async def there() -> bool:
        if client.done or client.story.over:
            return True
        if phase is Phase.PREFILLING:
            return await _prefilling(cell.routers[1 - client.order.router], client.story.request_id)
        unseen = client.order.door is Door.WHOLE or client.order.shape.final_only
        known = await _chosen(cell.routers[client.order.router], client.story.request_id) if unseen else client.story.tokens
        return known >= max(1, tokens[phase])

    if phase is not Phase.SENT:
        try:
            await until(there, PHASE_S, phase.value)
        except AssertionError:
            print(f"  #{client.story.request_id} did not come to {phase.value} within {PHASE_S:g} s")


async def _prefilling(address: str, request_id: str) -> bool:
    record = await _record(address, request_id)
    return record is not None and record.state not in _BEFORE_PREFILLING


async def _chosen(address: str, request_id: str) -> int:
    """Tokens of a request, as its router counts them: its client hears of them at the end."""
    record = await _record(address, request_id)
    return record.usage.selected_tokens if record is not None else 0


async def _record(address: str, request_id: str) -> pb.RequestRecord | None:
    async with connect(address) as stub:
        try:
            return (await stub.Get(pb.GetRequest(request_id=request_id), timeout=2)).record
        except grpc.aio.AioRpcError:
            await asyncio.sleep(LOOK_AGAIN_S)
            return None

"""Decode members leave under load, in order and not: every request is served with the text that it would have had (G4, G6)."""

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence

import grpc
import pytest

from models import Tokenizer
from rpc.application import ExitCode
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from tandem_cli.supervisor import Child
from tests.e2e.cells import Answer, ask_all, check, fresh_id, held, read, stub_of
from tests.e2e.conftest import cell_of
from tests.e2e.test_metrics import scrape
from tests.e2e.test_shutdown import ended, until_members
from tests.exact_dtype import EXACT_DTYPE
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS = 8
TOKENS = 96


def requests(tokenizer: Tokenizer) -> list[pb.GenerateRequest]:
    """Greedy and sampled ones, with prompts of different lengths, the same each time but for their ids."""
    made = []
    for number in range(REQUESTS):
        ids = tokenizer.encode(f"Story number {number}, told at length: " + "once upon a time " * (5 * number))
        request = pb.GenerateRequest(request_id=fresh_id("recovery"), tokens=pb.TokenPrompt(ids=ids), max_output_tokens=TOKENS)
        request.sampling.temperature = 0.0 if number % 2 else 0.7
        request.sampling.seed = number
        request.stop.ignore_eos = True
        request.utf8_policy = pb.UTF8_POLICY_DROP
        made.append(request)
    return made


async def running(stub: pb_grpc.InferenceServiceStub, made: Sequence[pb.GenerateRequest]) -> list["asyncio.Task[Answer]"]:
    """All of them, each past its first tokens."""
    calls = [stub.Generate(request, timeout=120) for request in made]
    begun = await asyncio.gather(*(read(call, up_to="delta") for call in calls))
    return [asyncio.create_task(read(call, answer)) for call, answer in zip(calls, begun, strict=True)]


async def where(stub: pb_grpc.InferenceServiceStub, made: Sequence[pb.GenerateRequest]) -> list[pb.RequestRecord]:
    return [(await stub.Get(pb.GetRequest(request_id=one.request_id), timeout=10)).record for one in made]


def busiest(cell: Cell, records: Sequence[pb.RequestRecord]) -> Child:
    (name, _), *_ = Counter(record.decode_member for record in records).most_common(1)
    return next(child for child in cell.decode if child.name == name)


def served(answers: Sequence[Answer], reference: Sequence[Answer]) -> None:
    for answer, wanted in zip(answers, reference, strict=True):
        assert (answer.status, answer.reason) == (grpc.StatusCode.OK, "max_output_tokens"), answer.details
        assert (answer.text, answer.token_ids) == (wanted.text, wanted.token_ids)
        assert answer.completed is not None and answer.completed.usage.selected_tokens == TOKENS


async def test_scale_in_and_a_crash_under_load_lose_nothing(tokenizer: Tokenizer) -> None:
    """From three decode members to one: the first is told to go, the second is killed."""
    with cell_of(dtype=EXACT_DTYPE, decode_members=3, kv_tokens=8192) as cell:
        async with stub_of(cell) as stub:
            reference = await ask_all(stub, requests(tokenizer), REQUESTS)

            made = requests(tokenizer)
            tasks = await running(stub, made)
            leaving = busiest(cell, await where(stub, made))
            leaving.process.send_signal(signal.SIGTERM)
            served(await asyncio.gather(*tasks), reference)
            assert await ended(leaving) == ExitCode.OK
            records = await where(stub, made)
            left = [record for record in records if record.attempt > 1]
            assert left and all(record.decode_member != leaving.name for record in left)
            # Its KV went along: nothing was computed again.
            assert {step.detail for record in left for step in record.transitions if step.event == "decode_lost"} == {"moved"}
            assert (await scrape(cell.routers[0]))["router_moves_total{outcome=ok}"] == len(left)
            await until_members(stub, (1, 2))

            made = requests(tokenizer)
            tasks = await running(stub, made)
            killed = busiest(cell, await where(stub, made))
            killed.process.kill()
            served(await asyncio.gather(*tasks), reference)
            records = await where(stub, made)
            survivor = next(child for child in cell.decode if child not in (leaving, killed))
            assert any(record.attempt > 1 for record in records)
            assert {record.decode_member for record in records if record.attempt > 1} == {survivor.name}
        await _nothing_held((*cell.routers, *cell.prefill, survivor))


async def _nothing_held(children: Sequence[Child]) -> None:
    for child in children:

        async def nothing(address: str = child.address) -> bool:
            found = await check(address)
            assert list(found.faults) == []
            return not held(found)

        await until(nothing, 20.0, f"{child.name} holds nothing")

"""Streams that are taken up again over real processes: at another router, after a rest, twice at once, and when a router dies."""

import asyncio
import signal
from collections.abc import Iterator

import grpc
import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tandem_cli.supervisor import Child
from tests.e2e.cells import Answer, ask, at_rest, check, fresh_id, greedy_request, held, read, stub_of
from tests.e2e.conftest import cell_of
from tests.exact_dtype import EXACT_DTYPE
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 200


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode("A long story about a lighthouse and its keeper:"))


@pytest.fixture
def own_cell() -> Iterator[Cell]:
    """A cell whose routers may be hurt."""
    with cell_of(dtype=EXACT_DTYPE, routers=2) as cell:
        yield cell


def attach(request: pb.GenerateRequest, answer: Answer) -> pb.AttachRequest:
    """From the event after the last one of `answer`."""
    return pb.AttachRequest(request_id=request.request_id, next_sequence_no=len(answer.sequence_nos))


def same(answer: Answer, whole: Answer) -> None:
    """The joined parts are what an undisturbed run brought: `Answer.take` has checked that no number is twice or missing."""
    assert answer.status is grpc.StatusCode.OK, answer.details
    assert (answer.text, answer.token_ids, answer.reason) == (whole.text, whole.token_ids, whole.reason)


async def test_coming_back_through_another_router_joins_to_the_whole(exact_cell: Cell, prompt: list[int]) -> None:
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        whole = await ask(stub, greedy_request(prompt, TOKENS))
        request = greedy_request(prompt, TOKENS, on_disconnect=pb.ON_DISCONNECT_DETACH)
        call = stub.Generate(request, timeout=60)
        answer = await read(call, up_to="delta")
        call.cancel()
        same(await read(other.Attach(attach(request, answer), timeout=60), answer), whole)
    await at_rest(exact_cell)


async def test_a_detached_request_is_there_when_its_client_comes_back(exact_cell: Cell, prompt: list[int]) -> None:
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        whole = await ask(stub, greedy_request(prompt, TOKENS))
        request = greedy_request(prompt, TOKENS, on_disconnect=pb.ON_DISCONNECT_DETACH)
        call = stub.Generate(request, timeout=60)
        answer = await read(call, up_to="started")
        call.cancel()

        async def finished() -> bool:
            record = (await other.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
            return record.state == pb.REQUEST_STATE_FINISHED

        await until(finished, 60, "the request runs to its end alone")
        same(await read(other.Attach(attach(request, answer), timeout=60), answer), whole)
    await at_rest(exact_cell)


async def test_b18_duplicates_at_both_routers_run_once(exact_cell: Cell, prompt: list[int]) -> None:
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        request = greedy_request(prompt, 40, request_id=fresh_id("twice"))
        answers = await asyncio.gather(*(ask(one, request) for one in (stub, other, stub, other)))
        for answer in answers:
            same(answer, answers[0])
            assert answer.completed == answers[0].completed
        record = (await other.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
        assert record.attempt == 1 and record.usage.selected_tokens == 40
    await at_rest(exact_cell)


async def test_a_router_that_is_killed_costs_its_client_a_reconnect(own_cell: Cell, prompt: list[int]) -> None:
    """kill -9 while it decodes: the other router adopts the seat, and nothing is computed again."""
    async with stub_of(own_cell, 0) as stub, stub_of(own_cell, 1) as other:
        whole = await ask(other, greedy_request(prompt, TOKENS))
        request = greedy_request(prompt, TOKENS)
        answer = await read(stub.Generate(request, timeout=60), up_to="delta")
        own_cell.routers[0].process.kill()
        same(await read(other.Attach(attach(request, answer), timeout=60), answer), whole)
        record = (await other.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
        assert record.attempt == 1 and record.state == pb.REQUEST_STATE_FINISHED
    await _nothing_held((own_cell.routers[1], *own_cell.prefill, *own_cell.decode))


async def test_a_router_that_was_frozen_sends_its_client_on(own_cell: Cell, prompt: list[int]) -> None:
    """Both connections get every event once and one end, though two routers have run the request."""
    async with stub_of(own_cell, 0) as stub, stub_of(own_cell, 1) as other:
        whole = await ask(other, greedy_request(prompt, TOKENS))
        request = greedy_request(prompt, TOKENS)
        call = stub.Generate(request, timeout=120)
        answer = await read(call, up_to="delta")
        frozen = own_cell.routers[0].process
        frozen.send_signal(signal.SIGSTOP)
        try:
            back = await read(other.Attach(pb.AttachRequest(request_id=request.request_id), timeout=60))
        finally:
            frozen.send_signal(signal.SIGCONT)
        same(back, whole)
        same(await read(call, answer), whole)
        assert answer.completed == back.completed
    await at_rest(own_cell)


async def _nothing_held(children: tuple[Child, ...]) -> None:
    for child in children:

        async def nothing(address: str = child.address) -> bool:
            found = await check(address)
            return not held(found) and not found.faults

        await until(nothing, 20.0, f"{child.name} holds nothing")

"""SIGTERM to each kind of process while requests run (B17, B38, B41): what runs ends by itself, what comes is refused or goes
elsewhere, and what outlives the budget ends with a typed error and one terminal event."""

import asyncio
import signal

import grpc
import pytest

from models import Tokenizer
from rpc.application import ExitCode
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.supervisor import Child
from tests.e2e.cells import Answer, ask, check, greedy_request, held, read, stub_of
from tests.e2e.conftest import cell_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EXIT_S = 20.0
#: Pages for a few requests: these cells live beside those that all tests share.
KV_TOKENS = 4096
#: Output tokens that take a moment, and more than any drain lasts.
SHORT, LONG = 60, 1000


async def ended(child: Child) -> int:
    """The exit code of a process that was told to stop."""
    async with asyncio.timeout(EXIT_S):
        return await asyncio.to_thread(child.process.wait, EXIT_S)


def natural(answer: Answer, tokens: int) -> None:
    """The stream came to its own end, whole."""
    assert answer.status is grpc.StatusCode.OK, answer.details
    assert (answer.reason, len(answer.token_ids)) == ("max_output_tokens", tokens)


def cut(answer: Answer, cause: str) -> None:
    """The stream was cut: one terminal event that says why, then UNAVAILABLE with the time to try again after."""
    assert answer.completed is not None and answer.reason == "transport_error"
    assert (answer.completed.state, answer.completed.cause) == (pb.REQUEST_STATE_FAILED, cause)
    assert answer.status is grpc.StatusCode.UNAVAILABLE and answer.error is not None
    assert answer.error.reason == cause.upper() and (answer.error.retry_after_s or 0) > 0
    assert 0 < len(answer.token_ids) == answer.completed.usage.returned_tokens < LONG


def refused(answer: Answer, reason: str) -> None:
    """Refused at the door, with the time to try again after."""
    assert answer.status is grpc.StatusCode.UNAVAILABLE and answer.completed is None and answer.error is not None
    assert answer.error.reason == reason and (answer.error.retry_after_s or 0) > 0


async def members(stub: pb_grpc.InferenceServiceStub) -> tuple[int, int]:
    """Prefill and decode members that the router gives work to."""
    (model,) = (await stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
    return model.prefill_members, model.decode_members


async def until_members(stub: pb_grpc.InferenceServiceStub, wanted: tuple[int, int]) -> None:
    """Wait until the router knows who leaves."""

    async def known() -> bool:
        return await members(stub) == wanted

    await until(known, 10.0, f"the router has {wanted} members")


async def test_b41_a_decode_member_finishes_its_streams_and_the_other_takes_the_new_ones(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The member leaves, the stream stays:")
    with cell_of(decode_members=2, kv_tokens=KV_TOKENS) as cell:
        async with stub_of(cell) as stub:
            request = greedy_request(prompt, SHORT)
            call = stub.Generate(request, timeout=60)
            answer = await read(call, up_to="delta")
            record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
            leaving = next(child for child in cell.decode if child.name == record.decode_member)
            staying = next(child for child in cell.decode if child is not leaving)
            leaving.process.send_signal(signal.SIGTERM)
            running = asyncio.create_task(read(call, answer))
            while not running.done():
                later = greedy_request(prompt, 4)
                natural(await ask(stub, later), 4)
            natural(await running, SHORT)
            assert await ended(leaving) == ExitCode.OK
            await until_members(stub, (1, 1))
            record = (await stub.Get(pb.GetRequest(request_id=later.request_id), timeout=10)).record
            assert record.decode_member == staying.name
            for child in (cell.routers[0], cell.prefill[0], staying):

                async def nothing_held(address: str = child.address) -> bool:
                    return not held(await check(address))

                await until(nothing_held, 10.0, f"{child.name} holds nothing")


async def test_b41_prefill_finishes_its_prompts_and_decode_ends_what_outlives_its_budget(tokenizer: Tokenizer) -> None:
    long_prompt = tokenizer.encode("again and " * 600)[:900]
    # Prefill's time is as long as a slow machine takes for such a prompt: this test is about what fits into it.
    times = (("prefill", "--drain-timeout-s=15"), ("decode", "--drain-timeout-s=2"), ("router", "--failover-wait-s=1"))
    extra = (*times, ("decode", "--context-tokens=2048"))
    with cell_of(kv_tokens=KV_TOKENS, extra=extra) as cell:
        (prefill,), (decode,) = cell.prefill, cell.decode
        async with stub_of(cell) as stub:
            outliving = stub.Generate(greedy_request(long_prompt[:5], LONG), timeout=60)
            answer = await read(outliving, up_to="delta")
            call = stub.Generate(greedy_request(long_prompt, 8), timeout=60)
            prompt_answer = await read(call, up_to="started")  # prefill is at work on it
            prefill.process.send_signal(signal.SIGTERM)
            natural(await read(call, prompt_answer), 8)
            assert await ended(prefill) == ExitCode.OK
            await until_members(stub, (0, 1))
            here = greedy_request(long_prompt[:40], 4)
            natural(await ask(stub, here), 4)
            record = (await stub.Get(pb.GetRequest(request_id=here.request_id), timeout=10)).record
            assert (record.prefill_member, record.decode_member) == ("", decode.name), "decode computes prompts itself now"

            decode.process.send_signal(signal.SIGTERM)
            await until_members(stub, (0, 0))
            assert decode.process.poll() is None, "it still runs what it has"
            refused(await ask(stub, greedy_request([5], 4)), "NO_MEMBER")
            cut(await read(outliving, answer), "decode_lost")  # no other member came in time
            assert await ended(decode) == ExitCode.DRAIN_CUT

            async def nothing_held() -> bool:
                return not held(await check(cell.address))

            await until(nothing_held, 10.0, "the router holds nothing")


async def test_b41_a_router_finishes_its_streams_and_ends_what_outlives_its_budget(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The router leaves:")
    extra = (("router", "--drain-timeout-s=12"), ("decode", "--context-tokens=2048"))
    with cell_of(routers=2, kv_tokens=KV_TOKENS, extra=extra) as cell:
        first, second = cell.routers
        async with stub_of(cell, 0) as stub, stub_of(cell, 1) as other:
            running = stub.Generate(greedy_request(prompt, SHORT), timeout=60)
            outliving = other.Generate(greedy_request(prompt, LONG), timeout=60)
            answer, last = await read(running, up_to="delta"), await read(outliving, up_to="delta")
            first.process.send_signal(signal.SIGTERM)

            async def refuses() -> Answer | None:
                found = await ask(stub, greedy_request(prompt, 2))
                return found if found.status is not grpc.StatusCode.OK else None

            refused(await until(refuses, 5.0, "the router refuses"), "DRAINING")
            natural(await read(running, answer), SHORT)
            assert await ended(first) == ExitCode.OK

            second.process.send_signal(signal.SIGTERM)
            cut(await read(outliving, last), "shutting_down")
            assert await ended(second) == ExitCode.DRAIN_CUT
        for child in (*cell.prefill, *cell.decode):

            async def nothing_held(address: str = child.address) -> bool:
                found = await check(address)
                assert list(found.faults) == []
                return not held(found)

            await until(nothing_held, 10.0, f"{child.name} holds nothing")

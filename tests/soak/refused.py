"""Requests that cannot be right: each is refused with the field that is wrong, and leaves no record."""

import asyncio
import random

import grpc
import grpc.aio

from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tests.e2e.cells import fresh_id

#: For a refusal and the look for a record, while routers and the store come back.
PATIENCE_S = 300.0
AGAIN_S = 0.2
#: By the field that the refusal must name.
BAD = {
    "max_output_tokens": {"text": "x", "max_output_tokens": 0},
    "sampling.temperature": {"text": "x", "sampling": pb.SamplingParams(temperature=11.0)},
    "sampling.top_p": {"text": "x", "sampling": pb.SamplingParams(top_p=1.5)},
    "priority": {"text": "x", "priority": 11},
    "choices": {"text": "x", "choices": 1000},
    "grammar.regex": {"text": "x", "grammar": pb.Grammar(regex="a(b")},
    "tokens.ids": {"tokens": pb.TokenPrompt(ids=[4_000_000_000])},
}


async def refused(routers: tuple[str, str], rng: random.Random) -> str:
    """Ask for something that cannot be right. A sentence about what was wrong with the answer; empty: nothing."""
    field, values = rng.choice(sorted(BAD.items()))
    request = pb.GenerateRequest(request_id=fresh_id("bad"), **values)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _refused(routers, rng.randrange(2), request, field)
    except TimeoutError:
        return f"a bad {field} was not answered within {PATIENCE_S:g} s"


async def _refused(routers: tuple[str, str], router: int, request: pb.GenerateRequest, field: str) -> str:
    while True:
        error = await _status(routers[router], request)
        if error is None:
            return f"a bad {field} was served"
        # A router that is away, or a member that was compiling the grammar.
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            break
        router = 1 - router
        await asyncio.sleep(AGAIN_S)
    fields = [one.field for one in details_from(error).violations]
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not any(name.startswith(field) for name in fields):
        return f"a bad {field} ended with {error.code()}, {fields}: {error.details()}"
    while True:
        found = await _looked_up(routers[router], request.request_id)
        if found is not grpc.StatusCode.UNAVAILABLE:
            return "" if found is grpc.StatusCode.NOT_FOUND else f"a bad {field} left a record: {found}"
        router = 1 - router
        await asyncio.sleep(AGAIN_S)


async def _status(address: str, request: pb.GenerateRequest) -> grpc.aio.AioRpcError | None:
    async with connect(address) as stub:
        try:
            async for _ in stub.Generate(request, timeout=PATIENCE_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def _looked_up(address: str, request_id: str) -> grpc.StatusCode:
    async with connect(address) as stub:
        try:
            await stub.Get(pb.GetRequest(request_id=request_id), timeout=30)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return grpc.StatusCode.UNAVAILABLE if late else error.code()
    return grpc.StatusCode.OK

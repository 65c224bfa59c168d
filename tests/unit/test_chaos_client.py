"""A client of a round that waits for an end that never comes says so."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.chaos.clients import Client
from tests.chaos.plan import Manner, Order
from tests.chaos.shapes import SHAPES


class Silent(pb_grpc.InferenceServiceServicer):
    """Starts every request and never goes on."""

    async def Generate(self, request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        yield pb.GenerateResponse(sequence_no=0, started=pb.Started(request_id=request.request_id))
        await asyncio.Event().wait()


@pytest.mark.slow
async def test_patience_that_ends_inside_a_call_is_told() -> None:
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Silent(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        order = Order(SHAPES[0], 0, Manner.READ, 0, 0.0, False)
        request = pb.GenerateRequest(request_id="r-1", text="x")
        client = Client(order, request, (address, address), attaches=True, forgetful=False, patience_s=0.5)
        story = await client.run()
    finally:
        await server.stop(None)
    assert story.broken == "no end within 0.5 s"

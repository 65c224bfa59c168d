"""A client's cancel, through one router or the other."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from rpc.channels import client_options
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

#: Between two tries to reach a router that answers.
AGAIN_S = 0.2
CANCEL_S = 20.0
#: A new connection is tried soon: routers that were killed come back.
SOON = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))


class Broken(AssertionError):
    """An answer that does not keep its promises."""


def channel_to(address: str, *more: tuple[str, int]) -> grpc.aio.Channel:
    """A connection of its own to a router."""
    options = [*client_options(), *SOON, *more, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=options)


async def cancelled(routers: tuple[str, str], first: int, request_id: str, *, wait: bool) -> pb.CancelResponse:
    """Through router `first`; through the other one when that does not answer; again until one does. Raises Broken."""
    message, router = pb.CancelRequest(request_id=request_id, reason="enough", wait=wait), first
    while True:
        async with channel_to(routers[router]) as channel:
            stub: Any = pb_grpc.InferenceServiceStub(channel)
            try:
                return await stub.Cancel(message, timeout=CANCEL_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise Broken(f"Cancel ended with {error.code()}: {error.details()}") from None
        await asyncio.sleep(AGAIN_S)
        router = 1 - router

"""Single calls to a router."""

import asyncio
from typing import Annotated, Any

import grpc.aio
import typer

from tandem_cli.client import connect, failure_of
from tandem_cli.exits import Exit, Failure
from tandem_cli.trust import trusted

#: Longer than the router's longest wait for a cancel to be effective.
CALL_TIMEOUT_S = 35.0

Address = Annotated[str, typer.Option("--address", help="host:port of a router.", envvar="TANDEM_ADDRESS", callback=trusted)]


def call(address: str, method: str, request: Any) -> Any:
    """The answer of one unary call. Raises Failure."""

    async def run() -> Any:
        async with connect(address) as stub:
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, address) from None
    except KeyboardInterrupt:
        raise Failure(Exit.CANCELLED, "interrupted before the answer came") from None

"""What the requests of the rounds give undisturbed: asked once, and known from then on."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from models import Tokenizer
from router.router_peers import TENANT_KEY
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tests.chaos.clients import Story
from tests.chaos.outputs import Output
from tests.chaos.shapes import Shape
from tests.e2e.cells import fresh_id

#: Undisturbed requests at once.
AT_ONCE = 4
#: For one of them, in seconds.
ANSWER_S = 180.0
#: A store that lost its memory, and a member that compiles grammars slowly, take requests within so many seconds.
SETTLED_S = 120.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What a shape gives undisturbed: its outputs by index, and the counts of all together. billed_tokens: None, not known."""

    outputs: dict[int, Output]
    finish_reason: int
    prompt_tokens: int
    selected_tokens: int
    returned_tokens: int
    billed_tokens: int | None = None


class Undisturbed:
    """Results by shape, asked for when first needed."""

    def __init__(self) -> None:
        self._known: dict[str, Expected] = {}

    def __getitem__(self, shape: Shape) -> Expected:
        return self._known[shape.name]

    async def learn(self, shapes: Iterable[Shape], address: str, tokenizer: Tokenizer) -> None:
        """Ask a router, at rest, for those that are not known yet."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(shape: Shape) -> None:
            async with gate:
                self._known[shape.name] = await _expected(stub, shape, tokenizer)

        async with connect(address) as stub:
            await asyncio.gather(*(one(shape) for shape in {s.name: s for s in shapes}.values() if shape.name not in self._known))


async def _expected(stub: Any, shape: Shape, tokenizer: Tokenizer) -> Expected:
    """Without its time limit. Asks again where nobody can take it yet: the store lost its memory before."""
    until = time.monotonic() + SETTLED_S
    shape = replace(shape, overall_s=0.0)
    while True:
        story = Story("", shape.several)
        try:
            request_id = fresh_id("undisturbed")
            # Each for a tenant of its own: no limit of tenants is met.
            call = stub.Generate(shape.request(request_id, tokenizer), timeout=ANSWER_S, metadata=((TENANT_KEY, request_id),))
            async for event in call:
                story.take(event, len(story.events))
            break
        except grpc.aio.AioRpcError as error:
            again = error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < until
            assert again, f"{shape.name} undisturbed: {error.code()} {error.details()}"
        await asyncio.sleep(0.2)
    completed = story.completed
    assert completed is not None, f"{shape.name} undisturbed: no end"
    assert completed.state == pb.REQUEST_STATE_FINISHED, f"{shape.name} undisturbed: {completed}"
    usage = completed.usage
    counts = (usage.prompt_tokens, usage.selected_tokens, usage.returned_tokens, usage.billed_tokens)
    return Expected(story.outputs, completed.finish_reason, *counts)

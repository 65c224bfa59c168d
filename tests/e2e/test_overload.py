"""Over budget: a tiny decode pool, many clients at once. Each ends well or is refused; none hangs; the books balance."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from models import Tokenizer
from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import at_rest, greedy_request, stub_of
from tests.e2e.conftest import cell_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUESTS = 50
QUEUE_REQUESTS = 20


@pytest.fixture(scope="module")
def tiny_cell() -> Iterator[Cell]:
    """Decode pages for about four requests at once; twenty may wait."""
    extra = (("decode", "--total-pages=49"), ("router", f"--queue-requests={QUEUE_REQUESTS}"), ("router", "--queue-clock-s=120"))
    with cell_of(extra=extra) as cell:
        yield cell


async def test_fifty_at_once_end_well_or_are_refused(tiny_cell: Cell, tokenizer: Tokenizer) -> None:
    requests = [greedy_request(tokenizer.encode("tick tock " * 20)[:100], 60) for _ in range(REQUESTS)]
    async with stub_of(tiny_cell) as stub:

        async def one(request: pb.GenerateRequest) -> str:
            try:
                events = [response async for response in stub.Generate(request, timeout=180)]
            except grpc.aio.AioRpcError as error:
                details = details_from(error)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                assert details.retry_after_s is not None and details.retry_after_s > 0 and details.reason
                return "refused"
            assert events[-1].completed.finish_reason == pb.FINISH_REASON_MAX_OUTPUT_TOKENS
            assert events[-1].completed.usage.selected_tokens == 60
            return "served"

        outcomes = Counter(await asyncio.gather(*(one(request) for request in requests)))
    assert outcomes["served"] >= QUEUE_REQUESTS and outcomes["refused"] > 0 and outcomes.total() == REQUESTS
    await at_rest(tiny_cell)


async def test_a_request_that_can_never_fit_is_refused_at_once_with_the_true_limit(tiny_cell: Cell) -> None:
    async with stub_of(tiny_cell) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(greedy_request(list(range(1000, 2000)), 24), timeout=20):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "768" in (refused.value.details() or "")
    await at_rest(tiny_cell)

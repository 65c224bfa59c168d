"""Who would wait for his queue clock in vain is told so as he comes, by gRPC and by HTTP, and when to come back."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest

from models import Tokenizer
from rpc.details import Quota
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from tests.e2e.cells import Answer, ask, at_rest, fresh_id, greedy_request, stub_of
from tests.e2e.conftest import cell_of
from tests.e2e.test_metrics import scrape
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Of those who say nothing else, in seconds: so little that no machine brings what waits in front of them to work in time.
QUEUE_CLOCK_S = 1.0
#: Of those who make the queue: they wait until it is their turn.
PATIENT_S = 240.0
#: So many ask again and again. The pages are for about four.
CROWD = 24
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
#: For the queue to stand until its pace is known, on a slow machine.
KNOWN_S = 120.0
#: A wait is told by the pace so far, and there is room for several at once or for none: so often at most one comes back.
COMES_BACK = 8
REFUSALS = "router_refusals_total{cause=queue_wait}"
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def short_cell() -> Iterator[Cell]:
    """Decode pages for about four requests at once, a short queue clock, and the HTTP door."""
    extra = (("decode", "--total-pages=17"), ("router", f"--queue-clock-s={QUEUE_CLOCK_S}"))
    with cell_of(http="127.0.0.1:0", extra=extra) as cell:
        yield cell


@dataclass(slots=True)
class Crowd:
    """Requests that stand in a router's queue until they are told to go; those that are in it then are still served."""

    stub: pb_grpc.InferenceServiceStub
    ids: list[int]
    _gone: bool = False

    def go(self) -> None:
        """Nobody asks anew."""
        self._gone = True

    async def stand(self) -> None:
        """One of them, until it is told to go."""
        while not self._gone:
            request = greedy_request(self.ids, OUTPUT_TOKENS)
            request.deadlines.queue.FromMilliseconds(round(PATIENT_S * 1000))
            answer = await ask(self.stub, request, PATIENT_S)
            assert answer.reason == "max_output_tokens", answer.details


@asynccontextmanager
async def standing_queue(cell: Cell, tokenizer: Tokenizer) -> AsyncIterator[Crowd]:
    """A queue that stands so long that its pace is known; everything is served and given back at the end."""
    async with stub_of(cell) as stub:
        crowd = Crowd(stub, tokenizer.encode("one after the other " * 20)[:PROMPT_TOKENS])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CROWD):
                tasks.create_task(crowd.stand())
            try:
                await until(lambda: _in_vain(crowd), KNOWN_S, "a request that would wait in vain is refused")
                yield crowd
            finally:
                crowd.go()
    await at_rest(cell)


async def _in_vain(crowd: Crowd) -> bool:
    """Whether one who comes now is refused at once, rather than left to wait until its clock is over."""
    answer = await ask(crowd.stub, greedy_request(crowd.ids, OUTPUT_TOKENS))
    assert answer.error is None or answer.error.reason in ("QUEUE_WAIT", "QUEUE_DEADLINE"), answer.details
    return answer.error is not None and answer.error.reason == "QUEUE_WAIT"


async def test_who_would_wait_in_vain_is_refused_and_is_served_when_he_comes_back(short_cell: Cell, tokenizer: Tokenizer) -> None:
    async with standing_queue(short_cell, tokenizer) as crowd:
        counted = (await scrape(short_cell.routers[0]))[REFUSALS]
        request = greedy_request(crowd.ids, OUTPUT_TOKENS)
        answer = await ask(crowd.stub, request)
        _check_refused(answer)
        assert (await scrape(short_cell.routers[0]))[REFUSALS] == counted + 1
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await crowd.stub.Get(pb.GetRequest(request_id=request.request_id), timeout=20)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        crowd.go()
        for _ in range(COMES_BACK):
            if answer.error is None:
                break
            if answer.error.reason == "QUEUE_DEADLINE":  # let in, and a moment too early: that request is over
                request.request_id = fresh_id()
            else:
                _check_refused(answer)
                await asyncio.sleep(answer.error.retry_after_s or 0.0)
            answer = await ask(crowd.stub, request)
        assert answer.error is None and answer.reason == "max_output_tokens", answer.details


def _check_refused(answer: Answer) -> None:
    error = answer.error
    assert answer.status is grpc.StatusCode.RESOURCE_EXHAUSTED and answer.completed is None and answer.started is None
    assert error is not None and error.reason == "QUEUE_WAIT"
    assert error.retry_after_s is not None and error.retry_after_s >= 1.0
    (quota,) = error.quotas
    assert quota == Quota("cell", quota.description, "queue_seconds", "queue_clock", quota.value) and quota.value <= QUEUE_CLOCK_S
    assert answer.details.startswith(quota.description)


async def test_the_http_door_refuses_with_429_and_the_time_to_come_back(short_cell: Cell, tokenizer: Tokenizer) -> None:
    async with (
        standing_queue(short_cell, tokenizer) as crowd,
        httpx.AsyncClient(base_url=short_cell.http_url, timeout=PATIENT_S) as http,
    ):
        counted = (await scrape(short_cell.routers[0]))[REFUSALS]
        asked = list(itertools.product(PATHS, (False, True)))
        for path, stream in asked:
            _check_429(await _post(http, path, crowd, stream=stream, request_id=fresh_id("http")))
        assert (await scrape(short_cell.routers[0]))[REFUSALS] == counted + len(asked)
        crowd.go()
        answer = await _post(http, PATHS[0], crowd, stream=False, request_id=fresh_id("http"))
        for _ in range(COMES_BACK):
            if answer.status_code == 200:
                break
            if answer.status_code == 504:
                assert answer.json()["error"]["code"] == "QUEUE_DEADLINE"
            else:
                _check_429(answer)
                await asyncio.sleep(float(answer.headers["retry-after"]))
            answer = await _post(http, PATHS[0], crowd, stream=False, request_id=fresh_id("http"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS


async def _post(http: httpx.AsyncClient, path: str, crowd: Crowd, *, stream: bool, request_id: str) -> httpx.Response:
    asked = {"prompt": crowd.ids} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Name three rivers."}]}
    body = {**asked, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    return await http.post(path, json=body, headers={"X-Request-Id": request_id})


def _check_429(answer: httpx.Response) -> None:
    assert answer.status_code == 429 and answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) >= 1 and "x-should-retry" not in answer.headers
    error = answer.json()["error"]
    assert error == {
        "message": error["message"],
        "type": "RateLimitError",
        "param": None,
        "code": "QUEUE_WAIT",
        "status": 429,
    }
    assert "try again later" in error["message"]

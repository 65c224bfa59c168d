"""Cells of real processes for the e2e tests, and what the tests ask of them."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from rpc.status import ErrorDetails, details_from
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from tandem_cli.client import connect
from tests.waiting import until

_NUMBERS = itertools.count()
REST_TIMEOUT_S = 20.0
#: Books that say what exists rather than what is held: anything else must be zero at rest.
CAPACITY = ("pages_free", "pages_cached", "pages_total", "landing_rows_free", "members", "steps")

#: Gauges that say what there is or is kept for a while, not what is held.
STANDING = re.compile(
    r"_build_info$|_members$|_leases$|_agents$|_busy_ratio$|_timestamp_seconds$|_kept_streams$|_kept_stream_bytes$"
    r"|_prefix_indexed_pages$|_prefix_hints$|_store_available$|_grammars$|_grammar_bytes$"
)


def fresh_id(prefix: str = "e2e") -> str:
    """An id that no other request of this run has."""
    return f"{prefix}-{next(_NUMBERS)}"


@dataclass(slots=True)
class Answer:
    """Everything one stream brought."""

    started: pb.Started | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completed: pb.Completed | None = None
    status: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    error: ErrorDetails | None = None
    sequence_nos: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The finish reason's name, without its prefix."""
        assert self.completed is not None, f"no terminal event: {self.status} {self.details}"
        return pb.FinishReason.Name(self.completed.finish_reason).removeprefix("FINISH_REASON_").lower()

    def take(self, response: pb.GenerateResponse) -> None:
        """Note one event, and that the order of events is kept."""
        assert self.completed is None, "an event after the terminal one"
        assert not self.sequence_nos or response.sequence_no == self.sequence_nos[-1] + 1, "sequence numbers do not rise by one"
        self.sequence_nos.append(response.sequence_no)
        kind = response.WhichOneof("event")
        if kind == "started":
            assert self.started is None and response.sequence_no == 0
            self.started = response.started
        elif kind == "delta":
            assert self.started is not None
            self.text += response.delta.text
            self.deltas.append(response.delta.text)
            self.token_ids += response.delta.token_ids
        else:
            self.completed = response.completed
            self.text += response.completed.text


async def read(call: grpc.aio.UnaryStreamCall, answer: Answer | None = None, up_to: str = "") -> Answer:
    """Read a stream to its end, whatever the end is, or up to the first event of a kind. `answer`: what was read before."""
    answer = answer or Answer()
    try:
        async for response in call:
            answer.take(response)
            if response.WhichOneof("event") == up_to:
                return answer
    except grpc.aio.AioRpcError as error:
        answer.status, answer.details, answer.error = error.code(), error.details() or "", details_from(error)
    return answer


def greedy_request(ids: Sequence[int], n: int, **changes: object) -> pb.GenerateRequest:
    """Greedy tokens after `ids`; end tokens do not end."""
    request = pb.GenerateRequest(
        request_id=fresh_id(),
        tokens=pb.TokenPrompt(ids=ids),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=n,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


async def ask(stub: pb_grpc.InferenceServiceStub, request: pb.GenerateRequest, timeout_s: float = 120.0) -> Answer:
    """One request from start to end."""
    return await read(stub.Generate(request, timeout=timeout_s))


async def ask_all(
    stub: pb_grpc.InferenceServiceStub, requests: Sequence[pb.GenerateRequest], at_once: int, timeout_s: float = 240.0
) -> list[Answer]:
    """All requests, so many at a time, answers in the order of the requests."""
    gate = asyncio.Semaphore(at_once)

    async def one(request: pb.GenerateRequest) -> Answer:
        async with gate:
            return await ask(stub, request, timeout_s)

    return list(await asyncio.gather(*(one(request) for request in requests)))


@asynccontextmanager
async def stub_of(cell: Cell, router: int = 0) -> AsyncIterator[pb_grpc.InferenceServiceStub]:
    """A client of one of the cell's routers."""
    async with connect(cell.routers[router].address) as stub:
        yield stub


async def check(address: str) -> member_pb2.CheckResponse:
    """The recount of one process."""
    async with grpc.aio.insecure_channel(address) as channel:
        return await member_pb2_grpc.AdminServiceStub(channel).Check(member_pb2.CheckRequest(), timeout=10)


def held(answer: member_pb2.CheckResponse) -> dict[str, int]:
    """What a process holds, leaving out what it merely has."""
    return {name: count for name, count in answer.books.items() if count and name not in CAPACITY}


async def at_rest(cell: Cell) -> None:
    """Every process: no fault, nothing held. Waits for what is still being released, within a bound."""
    for child in (*cell.routers, *cell.prefill, *cell.decode):
        last: dict[str, object] = {}

        async def nothing_held(address: str = child.address, last: dict[str, object] = last) -> bool:
            answer = await check(address)
            last["books"], last["faults"] = held(answer), list(answer.faults)
            return not last["books"] and not last["faults"]

        try:
            await until(nothing_held, REST_TIMEOUT_S, "at rest")
        except AssertionError as error:
            raise AssertionError(f"{child.name} still holds {last}") from error

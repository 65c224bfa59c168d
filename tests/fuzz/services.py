"""The services of routers and members under attack: any bytes, nearly good messages, messages in any order."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from hypothesis import strategies as st

from router.embedded import EmbeddedServer
from tandem.pools.v1 import decode_pb2, grant_pb2, member_pb2, prefill_pb2
from tandem.v1 import cell_pb2
from tandem.v1 import inference_pb2 as pb
from tests.contract import test_prefill_service as prefill_world
from tests.decode_member import decode_member
from tests.fuzz.messages import mutated, wire
from tests.fuzz.target import RESPONSES_MAX, Attacked, Target, answered
from tests.router_world import router_world

INFERENCE, POOLS = "/tandem.v1.InferenceService/", "/tandem.pools.v1."
WATCH = "/tandem.v1.CellService/Watch"
#: Of a router: what nobody reads or takes up again ends soon.
CLOCKS = {"overall_clock_s": 20.0, "max_overall_clock_s": 20.0, "detach_timeout_s": 1.0, "max_detach_timeout_s": 2.0}
#: Metadata that means something to a router.
_METADATA = st.lists(
    st.tuples(
        st.sampled_from(["tandem-tenant", "tandem-forwarded", "authorization", "traceparent", "grpc-timeout"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60),
    ),
    max_size=2,
).map(tuple)

_REQUESTS = (
    pb.GenerateRequest(request_id="r-1", text="hello", max_output_tokens=4),
    pb.GenerateRequest(request_id="r-2", text="hello", max_output_tokens=4, output_mode=pb.OUTPUT_MODE_FINAL_ONLY),
)
_UNARY: Mapping[str, tuple[type[Message], Sequence[Message]]] = {
    f"{INFERENCE}Cancel": (pb.CancelRequest, (pb.CancelRequest(request_id="r-1"),)),
    f"{INFERENCE}Get": (pb.GetRequest, (pb.GetRequest(request_id="r-1"),)),
    f"{INFERENCE}ListModels": (pb.ListModelsRequest, ()),
    f"{POOLS}AdminService/Check": (member_pb2.CheckRequest, ()),
}
_STREAMS: Mapping[str, tuple[type[Message], Sequence[Message]]] = {
    f"{INFERENCE}Generate": (pb.GenerateRequest, _REQUESTS),
    f"{INFERENCE}Attach": (pb.AttachRequest, (pb.AttachRequest(request_id="r-1"),)),
}


@st.composite
def _calls(draw: Any, methods: Mapping[str, tuple[type[Message], Sequence[Message]]]) -> tuple[str, bytes, Any]:
    method = draw(st.sampled_from(sorted(methods)))
    return method, draw(wire(*methods[method])), draw(_METADATA)


@asynccontextmanager
async def _router() -> AsyncIterator[Attacked]:
    with EmbeddedServer() as server:
        async with router_world(server.url, "fuzz", **CLOCKS) as world:

            async def attack(case: tuple[str, bytes, Any]) -> None:
                method, data, metadata = case
                kind = world.client.channel.unary_unary if method in _UNARY else world.client.channel.unary_stream
                # Views have no end.
                await answered(kind(method)(data, metadata=metadata, timeout=20), 1 if method == WATCH else RESPONSES_MAX)

            async def at_rest() -> None:
                await world.at_rest(50.0)

            yield Attacked(attack, at_rest)


_ORDERS = st.lists(
    st.one_of(
        wire(decode_pb2.DecodeRequest),
        st.sampled_from(["open", "adopt", "cancel", "pause", "lost", "keep_end", "push"]),
        st.tuples(st.just("open"), wire(decode_pb2.Open)),
    ),
    min_size=1,
    max_size=6,
)


@asynccontextmanager
async def _decode() -> AsyncIterator[Attacked]:
    async with decode_member(hold_most_s=0.5) as member:
        numbers = itertools.count()

        def message(step: Any) -> bytes:
            if isinstance(step, bytes):
                return step
            key = grant_pb2.AttemptKey(request_id=f"fuzz-{next(numbers)}", attempt=1)
            opening = member.message((1, 2, 3), key=key)
            if isinstance(step, tuple):
                # Fields of a message that follow others are merged into it.
                return decode_pb2.DecodeRequest(open=opening).SerializeToString() + _field(1, step[1])
            made = {
                "open": {"open": opening},
                "adopt": {"adopt": decode_pb2.Adopt(key=key, incarnation=member.frame.incarnation, next_sequence_no=1)},
                "cancel": {"cancel": decode_pb2.CancelSeat(reason="client_cancel")},
                "pause": {"pause": decode_pb2.PauseSeat()},
                "lost": {"prefill_lost": decode_pb2.PrefillLost()},
                "keep_end": {"keep_end": decode_pb2.KeepEnd()},
                "push": {"push": decode_pb2.PushSeat()},
            }
            return decode_pb2.DecodeRequest(**made[step]).SerializeToString()

        async def attack(steps: Sequence[Any]) -> None:
            call = member.channel.stream_stream(f"{POOLS}DecodeService/Decode")(timeout=20)
            try:
                for step in steps:
                    await call.write(message(step))
                await call.write(decode_pb2.DecodeRequest(cancel=decode_pb2.CancelSeat(reason="taken")).SerializeToString())
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # it has ended already: the status says how
            await answered(call)

        yield Attacked(attack, member.assert_empty)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field on the wire."""
    head, size = bytes([number << 3 | 2]), len(content)
    while size > 127:
        head += bytes([size & 127 | 128])
        size >>= 7
    return head + bytes([size]) + content


_PREFILL_METHODS: Mapping[str, tuple[type[Message], Sequence[Message]]] = {
    f"{POOLS}PrefillService/Drain": (prefill_pb2.DrainRequest, ()),
    f"{POOLS}AdminService/Check": (member_pb2.CheckRequest, ()),
}


@asynccontextmanager
async def _prefill() -> AsyncIterator[Attacked]:
    async with prefill_world.member() as world:
        channel = world.stub_channel

        async def attack(case: Any) -> None:
            if case[0] == "good":
                world.reader.pages = 0
                grant = world.reader.offer([1, 2, 3, 4, 5], world.frame.incarnation)
                request = world.request([1, 2, 3, 4, 5], grant).SerializeToString()
                data, method = request + case[1], f"{POOLS}PrefillService/Prefill"
            elif case[0] == "raw":
                data, method = case[1], f"{POOLS}PrefillService/Prefill"
            else:
                method, data, _ = case
                await answered(channel.unary_unary(method)(data, timeout=20))
                return
            await answered(channel.unary_stream(method)(data, timeout=20))

        yield Attacked(attack, world.at_rest)


_VIEWS = {WATCH: (cell_pb2.WatchRequest, (cell_pb2.WatchRequest(max_requests=5),))}
SERVICES = (
    Target("router", _calls({**_UNARY, **_STREAMS}), _router),
    Target("cell", _calls({**_VIEWS, f"{INFERENCE}Generate": _STREAMS[f"{INFERENCE}Generate"]}), _router),
    Target("decode", _ORDERS, _decode),
    Target(
        "prefill",
        st.one_of(
            st.tuples(st.just("good"), wire(prefill_pb2.PrefillRequest)),
            st.tuples(st.just("good"), mutated(wire(prefill_pb2.PrefillRequest))),
            st.tuples(st.just("raw"), wire(prefill_pb2.PrefillRequest)),
            _calls(_PREFILL_METHODS),
        ),
        _prefill,
    ),
)

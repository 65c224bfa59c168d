"""A whole cell in the test's process: router, prefill and decode member, each a real server, over the in-memory transport.

Runners and tokenizer are the test's own, so that a step can be held and everything that happens can be written down.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_svc.config import DecodeSettings
from decode_svc.service import DecodeService
from decode_svc.service import Parts as DecodeParts
from engine.batch import Batch, LayerMarks
from engine.runner import Runner, RunnerStatistics
from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from member.process import open_member
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts as PrefillParts
from prefill_svc.service import PrefillService
from router.config import RouterSettings
from router.request import ServedModel
from router.service import LoadedModel, Router
from rpc.application import Frame
from rpc.serving import Process
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.client import connect
from tests.e2e.cells import CAPACITY, check
from tests.scripted import StepGate
from tests.waiting import until
from text.detokeniser import TextStream, Utf8Policy

WAIT_S = 10.0

#: What happened, in order, as (name, value).
Events = list[tuple[str, Any]]


class WatchedRunner:
    """A decode member's runner behind the port: writes down when a step begins and ends, and holds it while `gate` is held."""

    def __init__(self, runner: Runner, events: Events) -> None:
        self._runner = runner
        self._events = events
        self.gate = StepGate()
        self.steps = 0
        self.layout = runner.layout
        self.vocabulary_size = runner.vocabulary_size
        self.context_tokens = runner.context_tokens
        self.adapters = runner.adapters
        self.slabs = runner.slabs
        self.slab_data = runner.slab_data

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> Any:
        """See Runner."""
        self.steps += 1
        step = self.steps
        self._events.append(("decode.started", step))
        self.gate.passage()
        logits = self._runner.run(batch, marks)
        self._events.append(("decode.completed", step))
        return logits

    def rest(self) -> None:
        pass

    def statistics(self) -> RunnerStatistics:
        """See Runner."""
        return self._runner.statistics()


class WatchedStream:
    """A text stream that writes down which tokens were selected, and that pending bytes were dropped after a stop."""

    def __init__(self, stream: TextStream, events: Events) -> None:
        self._stream = stream
        self._events = events
        self._selected = 0

    @property
    def pending(self) -> bytes:
        return self._stream.pending

    def push(self, token_id: int) -> bytes:
        self._selected += 1
        self._events.append(("selected", self._selected))
        return self._stream.push(token_id)

    def finish(self, policy: Utf8Policy | None = None) -> bytes:
        return self._stream.finish(policy)

    def drop(self) -> None:
        self._events.append(("stop_hit", self._selected))
        self._stream.drop()


class WatchedTokenizer:
    """A decode member's tokenizer, whose streams write down what they are given."""

    def __init__(self, tokenizer: Any, events: Events) -> None:
        self._tokenizer = tokenizer
        self._events = events
        self.eos_ids = tokenizer.eos_ids
        self.token_bytes = tokenizer.token_bytes
        self.piece = tokenizer.piece

    def detokeniser(self, policy: Utf8Policy = Utf8Policy.ERROR) -> TextStream:
        """As the tokenizer's own."""
        return WatchedStream(self._tokenizer.detokeniser(policy), self._events)


@dataclass
class Decode:
    """A decode member of a cell."""

    process: Process
    service: DecodeService
    runner: WatchedRunner


@dataclass
class OneProcessCell:
    """A running cell. `events`: what decode members did and what `follow` saw arrive at the client, in order.

    decode, decode_service, decode_runner: of the first decode member; decodes: all of them.
    """

    stub: pb_grpc.InferenceServiceStub
    router: Process
    prefill: Process
    decode: Process
    decode_service: DecodeService
    decode_runner: WatchedRunner
    events: Events
    decodes: list[Decode]
    arrived: list[pb.GenerateResponse] = field(default_factory=list)

    async def next(self, call: Any) -> pb.GenerateResponse:
        """The next event of a stream, written down as it arrives."""
        response: pb.GenerateResponse = await call.read()
        self.arrived.append(response)
        kind = response.WhichOneof("event")
        if kind == "delta":
            self.events.append(("delta", response.delta.text))
        elif kind == "completed":
            reason = pb.FinishReason.Name(response.completed.finish_reason).removeprefix("FINISH_REASON_").lower()
            self.events.append(("completed", reason))
        return response

    async def until_kind(self, call: Any, kind: str) -> pb.GenerateResponse:
        """Read up to the first event of a kind."""
        while (response := await self.next(call)).WhichOneof("event") != kind:
            pass
        return response

    async def held_messages(self, count: int) -> None:
        """Wait until so many messages wait for the end of the decode member's held step."""

        async def there() -> bool:
            return self.decode_service.inbox.statistics().waiting >= count

        await until(there, WAIT_S, f"{count} messages wait in the decode member's inbox")

    async def at_rest(self) -> None:
        """Every process: no fault, nothing held."""
        for process in (self.router, self.prefill, *(one.process for one in self.decodes if not one.process.draining())):
            address = process.frame.address

            async def nothing_held(address: str = address) -> bool:
                found = await check(address)
                assert list(found.faults) == []
                return not any(count for name, count in found.books.items() if name not in CAPACITY)

            await until(nothing_held, WAIT_S, f"{process.frame.name} is at rest")


@dataclass(frozen=True)
class Model:
    """What a cell serves: a way to make a runner for each member, and the tokenizer of router and decode member."""

    make_runner: Callable[[], Runner]
    tokenizer: Any
    name: str = "scripted"


@contextlib.asynccontextmanager
async def one_process_cell(
    model: Model, redis_url: str, cell: str, *, decodes: int = 1, **settings: Any
) -> AsyncIterator[OneProcessCell]:
    """From start to end, in the order of a shutdown. `settings` are the router's."""
    events: Events = []
    fabric = MemoryFabric()
    runners = [WatchedRunner(model.make_runner(), events) for _ in range(decodes)]
    services: list[DecodeService] = []
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "metrics_port": None, "drain_settle_s": 0.0, "drain_timeout_s": 10.0}
    pool = {**common, "transport": "memory"}
    prefill_settings = PrefillSettings(**pool, name="prefill-0")

    def prefill(frame: Frame) -> PrefillService:
        parts = PrefillParts(model.make_runner, lambda name, slabs: MemorySender(fabric, name, slabs), model.name)
        return PrefillService(frame, prefill_settings, parts)

    def decode(frame: Frame) -> DecodeService:
        runner = runners[len(services)]
        parts = DecodeParts(
            lambda: runner,
            lambda: WatchedTokenizer(model.tokenizer, events),
            lambda name, slabs: MemoryReceiver(fabric, name, slabs),
            model.name,
            make_sender=lambda name, slabs: MemorySender(fabric, name, slabs),
        )
        services.append(DecodeService(frame, decode_settings[len(services)], parts))
        return services[-1]

    decode_settings = [DecodeSettings(**pool, name=f"decode-{number}") for number in range(decodes)]

    async with contextlib.AsyncExitStack() as stack:
        members = [open_member(prefill, prefill_settings, "prefill")]
        members += [open_member(decode, one, "decode") for one in decode_settings]
        addresses = [await _opened(stack, member) for member in members]
        router_settings = RouterSettings(
            **{
                **common,
                "name": "router-0",
                "redis_url": redis_url,
                "cell": cell,
                "prefill": (addresses[0],),
                "decode": tuple(addresses[1:]),
                **settings,
            }
        )
        first = runners[0]
        served = ServedModel(model.name, first.layout.model_snapshot, first.context_tokens, first.vocabulary_size)
        loaded = LoadedModel(served, model.tokenizer)
        router = Process(lambda frame: Router(frame, router_settings, lambda: loaded), router_settings, "router")
        address = await _opened(stack, router)
        stub = await stack.enter_async_context(connect(address))
        for runner in runners:
            stack.callback(runner.gate.release)
        made = [Decode(*one) for one in zip(members[1:], services, runners, strict=True)]
        yield OneProcessCell(stub, router, members[0], made[0].process, made[0].service, made[0].runner, events, made)


async def _opened(stack: contextlib.AsyncExitStack, process: Process) -> str:
    """Open a process; drain (unless the test did) and close it at the end. Returns its address."""

    async def drain() -> None:
        if not process.draining():
            await process.drain()

    stack.push_async_callback(process.close)
    frame = await process.open()
    stack.push_async_callback(drain)
    return frame.address


def texts(responses: Sequence[pb.GenerateResponse]) -> list[str]:
    """The text of each delta."""
    return [response.delta.text for response in responses if response.WhichOneof("event") == "delta"]

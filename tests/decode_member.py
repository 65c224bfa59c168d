"""A decode member within the test's process, over a real gRPC server, with a scripted model and the memory transport.

Beside it a writer that plays a prefill member: it computes prompts with a scripted model of its own and pushes them.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from decode_svc.config import DecodeSettings
from decode_svc.draft_loading import DraftModel
from decode_svc.grammars import MakeCompiler
from decode_svc.service import DecodeService, Parts
from engine.batch import Batch, Rows
from engine.landing import LandingRows
from engine.runner import Runner
from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.offer import Grant, LayoutView, Slab, grant_from_proto
from kv_transfer.plan import SourceMemory, plan
from member.process import open_member
from rpc.application import Frame
from rpc.channels import internal_channel
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc, grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem.v1 import inference_pb2
from tests.grammars import CompilerHere
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from tests.waiting import until

WAIT_S = 10.0


def _slab(memory: Any) -> Slab:
    return Slab(memory.address, memory.size_bytes, memory.unit_bytes)


class Writer(prefill_pb2_grpc.PrefillServiceServicer):
    """Plays a prefill member. `drained`: what it answers to Drain; `silent` makes it not answer at all."""

    def __init__(self, fabric: MemoryFabric, like: ScriptedRunner, incarnation: str = "writer-1") -> None:
        self.incarnation = incarnation
        self.address = ""
        self.drains: list[str] = []
        self.state = prefill_pb2.DRAIN_STATE_DRAINED
        self.silent = False
        self._runner = ScriptedRunner(like.vocabulary_size, like.outputs, page_tokens=like.page_tokens, total_pages=64)
        self._staging = LandingRows(2, like.vocabulary_size)
        self._slabs = (_slab(self._runner.slabs[0]), _slab(self._staging.slab))
        self._sender = MemorySender(fabric, "writer", self._slabs)
        self._pushes = 0

    @property
    def peer(self) -> grant_pb2.Peer:
        """As an Open names it."""
        return grant_pb2.Peer(member="prefill-0", incarnation=self.incarnation, address=self.address)

    @property
    def view(self) -> LayoutView:
        """The layout of both sides."""
        return LayoutView(self._runner.layout.fingerprint, (self._runner.page_tokens,))

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        """See prefill.proto."""
        self.drains.append(request.grant_id.hex())
        if self.silent:
            await asyncio.sleep(WAIT_S)
        return prefill_pb2.DrainResponse(state=self.state)

    def fill(self, message: grant_pb2.Grant, prompt: Sequence[int], parts: int | None = None) -> Grant:
        """Compute a prompt and push it, or only its first `parts` parts."""
        grant = grant_from_proto(message, self.view)
        pages = list(range(1, 2 + len(prompt) // self._runner.page_tokens))
        logits = self._runner.run(Batch((Rows("prompt", tuple(prompt), 0, (pages,), True),)))
        self._staging.row(0).copy_(logits[0])
        handover = plan(grant, SourceMemory(self.view, self._slabs[:1], self._slabs[1]))
        self._sender.connect(grant.endpoint)
        for part in range(len(handover.parts) if parts is None else parts):
            self._pushes += 1
            self._sender.post(handover.push(self._pushes, part, (pages,), 0))
        while self._sender.in_flight:
            self._sender.poll()
        return grant


@dataclass
class Seat:
    """One open Decode call and everything that came on it."""

    call: Any
    request_id: str = ""
    holds: bool = False
    granted: Any = None
    refused: Any = None
    committed: Any = None
    paused: Any = None
    pushed: Any = None
    ended: Any = None
    adopted: Any = None
    outputs: list[Any] = field(default_factory=list)
    deltas: list[Any] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    async def next(self) -> str:
        """The next response; its kind, or "" at the end of the call."""
        async with asyncio.timeout(WAIT_S):
            response = await self.call.read()
        if response is grpc.aio.EOF:
            return ""
        kind: str = response.WhichOneof("event")
        value = getattr(response, kind)
        # The rest of the output comes in one message with the end.
        self.order += ["output", kind] if kind == "ended" and value.HasField("last") else [kind]
        if kind == "output":
            self._take(value)
            return kind
        assert getattr(self, kind) is None, f"a second {kind}"
        setattr(self, kind, value)
        if kind == "ended" and value.HasField("last"):
            self._take(value.last)
        return kind

    def _take(self, output: Any) -> None:
        self.outputs.append(output)
        if not output.response:
            assert output.selected_token_ids and not output.text_bytes and not output.returned_tokens
            return
        event = inference_pb2.GenerateResponse.FromString(output.response)
        assert event.sequence_no + 1 == output.next_sequence_no
        assert output.text_bytes == len(event.delta.text.encode())
        assert output.returned_tokens == len(event.delta.token_ids)
        self.deltas.append(event)

    async def until(self, kind: str) -> Any:
        """Read up to the first response of a kind."""
        while (found := await self.next()) != kind:
            assert found, f"the call ended before {kind}: {self.order}"
        return self.outputs[-1] if kind == "output" else getattr(self, kind)

    async def finish(self) -> "Seat":
        """Read to the end of the call, saying that the end has arrived; the terminal is last and numbers rise by one."""
        while kind := await self.next():
            if kind == "ended" and self.holds:
                # A seat that was told to end does not wait for it: the call may be over, and its status lost with the write.
                try:
                    await self.send(cancel=decode_pb2.CancelSeat(reason="taken"))
                except grpc.aio.AioRpcError:
                    break
        assert self.order[-1] in ("ended", "refused")
        numbers = [event.sequence_no for event in self.deltas]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if self.ended is not None and numbers:
            assert self.ended.next_sequence_no == numbers[-1] + 1
        return self

    async def send(self, **message: Any) -> None:
        """One more request on the call."""
        await self.call.write(decode_pb2.DecodeRequest(**message))

    @property
    def told(self) -> list[int]:
        """All tokens chosen that outputs told."""
        return [token for output in self.outputs for token in output.selected_token_ids]

    @property
    def text(self) -> str:
        """All text of the deltas."""
        return "".join(event.delta.text for event in self.deltas)

    @property
    def texts(self) -> list[str]:
        """The text of each delta."""
        return [event.delta.text for event in self.deltas]


@dataclass
class Member:
    """A running decode member and what a test needs of it."""

    frame: Frame
    service: DecodeService
    process: Any
    runner: ScriptedRunner
    tokenizer: ScriptedTokenizer
    fabric: MemoryFabric
    writer: Writer
    stub: Any
    admin: Any
    channel: grpc.aio.Channel
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def message(self, prompt: Sequence[int], **changes: Any) -> decode_pb2.Open:
        """An Open, with the defaults of a router."""
        fields: dict[str, Any] = {
            "key": grant_pb2.AttemptKey(request_id=f"request-{next(self.numbers)}", attempt=1),
            "model_snapshot": self.runner.layout.model_snapshot,
            "incarnation": self.frame.incarnation,
            "prompt_token_ids": prompt,
            "sampling": inference_pb2.SamplingParams(temperature=0.0, seed=1),
            "max_output_tokens": 8,
            "first_sequence_no": 1,
        }
        return decode_pb2.Open(**{**fields, **changes})

    async def open(self, prompt: Sequence[int], **changes: Any) -> Seat:
        """Open a seat."""
        message = self.message(prompt, **changes)
        seat = Seat(self.stub.Decode(), message.key.request_id, message.hold_s > 0)
        await seat.send(open=message)
        return seat

    @property
    def peer(self) -> grant_pb2.Peer:
        """As an Open names it when its sequences move."""
        return grant_pb2.Peer(member=self.frame.name, incarnation=self.frame.incarnation, address=self.frame.address)

    async def adopt(self, key: grant_pb2.AttemptKey, next_sequence_no: int, incarnation: str | None = None) -> Seat:
        """Take a seat over."""
        seat = Seat(self.stub.Decode(), key.request_id, True)
        meant = self.frame.incarnation if incarnation is None else incarnation
        await seat.send(adopt=decode_pb2.Adopt(key=key, incarnation=meant, next_sequence_no=next_sequence_no))
        return seat

    async def books(self) -> Mapping[str, int]:
        """The recount; it must find no fault."""
        response = await self.admin.Check(member_pb2.CheckRequest())
        assert list(response.faults) == []
        return dict(response.books)

    async def until_books(self, holds: Callable[[Mapping[str, int]], bool], what: str) -> Mapping[str, int]:
        """Recount until something holds."""
        found: Mapping[str, int] = {}

        async def look() -> bool:
            nonlocal found
            found = await self.books()
            return holds(found)

        await until(look, WAIT_S, what)
        return found

    async def step_with(self, waiting: int = 1) -> None:
        """Let one held step through once so many messages wait for its end."""

        async def wait() -> bool:
            return self.service.inbox.statistics().waiting >= waiting

        await until(wait, WAIT_S, f"{waiting} messages in the inbox")
        self.runner.gate.step()

    async def until_noted(self) -> None:
        """Wait until the end of a seat was asked for."""

        async def noted() -> bool:
            return any(stream.asked_to_end for stream in self.service.streams.open())

        await until(noted, WAIT_S, "the end of a seat was asked for")

    async def assert_empty(self) -> None:
        """Nothing is held any more."""
        gone = ("streams", "grants_open", "seats", "drain_calls")
        books = await self.until_books(lambda found: not any(found[name] for name in gone), "everything is given back")
        assert books["pages_free"] + books["pages_cached"] == books["pages_total"]
        held = {k: v for k, v in books.items() if k not in ("pages_free", "pages_cached", "pages_total") and v}
        assert held == {}


@contextlib.asynccontextmanager
async def decode_member(
    outputs: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    *,
    words: Sequence[bytes] = (),
    otherwise: Callable[[tuple[int, ...]], int] | None = None,
    total_pages: int = 64,
    fabric: MemoryFabric | None = None,
    window: int | None = None,
    model: Runner | None = None,
    drafter: DraftModel | None = None,
    make_compiler: MakeCompiler = CompilerHere,
    **settings: Any,
) -> AsyncIterator[Member]:
    """A member, from its start to its end; `settings` are DecodeSettings. `fabric`: shared with other members. window: see
    ScriptedRunner; the writer beside it has none. model: runs instead of the script. drafter: loaded for the
    one that the settings name."""
    tokenizer = ScriptedTokenizer(words)
    limit = settings.get("context_tokens", 128)
    runner = ScriptedRunner(
        tokenizer.vocabulary_size, outputs, otherwise=otherwise, total_pages=total_pages, context_tokens=limit, window=window
    )
    fabric = fabric or MemoryFabric()
    writer = Writer(fabric, runner)
    made: list[DecodeService] = []
    chosen = DecodeSettings(
        **{"listen": "127.0.0.1:0", "transport": "memory", "metrics_port": None, "drain_settle_s": 0.0, **settings}
    )

    def build(frame: Frame) -> DecodeService:
        parts = Parts(
            lambda: model or runner,
            lambda: tokenizer,
            lambda name, slabs: MemoryReceiver(fabric, name, slabs),
            "scripted",
            make_sender=lambda name, slabs: MemorySender(fabric, name, slabs),
            make_compiler=make_compiler,
            load_draft_model=lambda: drafter,
        )
        made.append(DecodeService(frame, chosen, parts))
        return made[0]

    async with contextlib.AsyncExitStack() as stack:
        peer_server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(writer, peer_server)
        writer.address = f"127.0.0.1:{peer_server.add_insecure_port('127.0.0.1:0')}"
        await peer_server.start()
        stack.push_async_callback(peer_server.stop, None)
        process = open_member(build, chosen, "decode")
        stack.push_async_callback(process.close)
        frame = await process.open()
        channel = internal_channel(frame.address)
        stack.push_async_callback(channel.close, None)
        stack.callback(runner.gate.release)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        admin = member_pb2_grpc.AdminServiceStub(channel)
        yield Member(frame, made[0], process, runner, tokenizer, fabric, writer, stub, admin, channel)

"""Members for router tests: real gRPC servers that speak the pools' port and do what a test scripts.

The hand-over between them is a call inside this process: a prefill fake that finishes a grant tells the decode fake, which
commits. Nothing is kinder than the real thing: seats live as long as their stream, incarnations and snapshots are checked.
"""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from tandem.pools.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    grant_pb2,
    member_pb2,
    member_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tandem.v1 import inference_pb2 as pb

SNAPSHOT = "snapshot-1"
PAGE_TOKENS = 16
_grants = itertools.count(1)


class Gate:
    """Open unless a test holds it; tells how many have come to it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._reached = asyncio.Condition()
        self.reached = 0

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def passed(self, *others: asyncio.Event) -> None:
        """Waits until the gate is open, or one of `others` is set."""
        async with self._reached:
            self.reached += 1
            self._reached.notify_all()
        await first_of(self._open, *others)

    async def reached_by(self, count: int, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s), self._reached:
            await self._reached.wait_for(lambda: self.reached >= count)


async def first_of(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    if any(event.is_set() for event in events):
        return
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FakeMember:
    """What both fakes share: a server, an identity, a Watch stream."""

    role = member_pb2.MEMBER_ROLE_UNSPECIFIED

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.address = ""
        self.info_changes: dict[str, object] = {}
        self.load = member_pb2.MemberLoad()
        self.silent = False
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        member_pb2_grpc.add_MemberServiceServicer_to_server(self, server)
        self.add_to(server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """As a killed process: every stream breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """Another incarnation at the same address."""
        port = int(self.address.rpartition(":")[2])
        await self.stop()
        self.incarnation = uuid.uuid4().hex
        await self.start(port)

    def tell(self) -> None:
        """Watchers get the load now."""
        self._changed.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def info(self) -> member_pb2.MemberInfo:
        info = member_pb2.MemberInfo(
            peer=grant_pb2.Peer(member=self.name, incarnation=self.incarnation, address=self.address),
            role=self.role,
            model="fake",
            model_snapshot=SNAPSHOT,
            layout_fingerprint="f" * 32,
            page_tokens=PAGE_TOKENS,
            total_pages=1000,
            context_tokens=512,
            vocabulary_size=300,
            max_sequences=64,
            max_queued_tokens=100_000,
        )
        for key, value in self.info_changes.items():
            setattr(info, key, value)
        return info

    async def Watch(self, request: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        await context.write(member_pb2.WatchResponse(info=self.info(), load=self.load))
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if not self.silent:
                await context.write(member_pb2.WatchResponse(load=self.load))


@dataclass(eq=False)
class FakeSeat:
    """One open stream of the decode fake."""

    opening: decode_pb2.Open
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""


@dataclass
class DecodeScript:
    """What the decode fake does with its next seats."""

    refusals: deque[decode_pb2.Refused] = field(default_factory=deque)
    tokens: int = 3
    text: Callable[[int], str] = lambda index: f"t{index} "
    grant: Gate = field(default_factory=Gate)
    commit: Gate = field(default_factory=Gate)
    output: Gate = field(default_factory=Gate)
    ending: Gate = field(default_factory=Gate)
    #: End the stream after so many outputs, without an Ended; `cut_code` None ends it with OK.
    cut_after: int | None = None
    cut_code: grpc.StatusCode | None = None
    ended: dict[str, object] = field(default_factory=lambda: {"finish_reason": pb.FINISH_REASON_MAX_OUTPUT_TOKENS})
    deaf: bool = False


class FakeDecode(FakeMember, decode_pb2_grpc.DecodeServiceServicer, member_pb2_grpc.MemberServiceServicer):
    """A decode member."""

    role = member_pb2.MEMBER_ROLE_DECODE

    def __init__(self, name: str = "decode-0") -> None:
        super().__init__(name)
        self.script = DecodeScript()
        self.load = member_pb2.MemberLoad(free_pages=1000)
        self.opens: list[decode_pb2.Open] = []
        self.metadata: list[dict[str, str]] = []
        self.heard: list[str] = []
        self.seats: set[FakeSeat] = set()
        self.grants: dict[bytes, FakeSeat] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Decode(self, requests: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        seat = FakeSeat((await context.read()).open)
        self.opens.append(seat.opening)
        self.metadata.append(dict(context.invocation_metadata()))
        self.seats.add(seat)
        listening = asyncio.create_task(self._listen(seat, context))
        try:
            await self._serve(seat, context)
        finally:
            self.seats.discard(seat)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, seat: FakeSeat, context: grpc.aio.ServicerContext) -> None:
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            kind = request.WhichOneof("message")
            seat.reason = request.cancel.reason if kind == "cancel" else request.prefill_lost.cause
            self.heard.append(seat.reason)
            late = kind == "prefill_lost" and seat.committed.is_set()  # a hand-over that is complete can not be lost
            if not self.script.deaf and not late:
                seat.stopped.set()

    async def _serve(self, seat: FakeSeat, context: grpc.aio.ServicerContext) -> None:
        script, opening = self.script, seat.opening
        if opening.incarnation != self.incarnation:
            refused = decode_pb2.Refused(reason="wrong_incarnation", retryable=True)
            await context.write(decode_pb2.DecodeResponse(refused=refused))
            return
        if script.refusals:
            await context.write(decode_pb2.DecodeResponse(refused=script.refusals.popleft()))
            return
        await script.grant.passed(seat.stopped)
        granted = decode_pb2.Granted()
        if opening.HasField("prefill"):
            granted.grant.CopyFrom(self._grant(seat))
        await context.write(decode_pb2.DecodeResponse(granted=granted))
        if opening.HasField("prefill"):
            await first_of(seat.committed, seat.stopped)
        await script.commit.passed(seat.stopped)
        sent = 0
        if not seat.stopped.is_set():
            await context.write(decode_pb2.DecodeResponse(committed=decode_pb2.Committed(handover_s=0.001)))
            sent = await self._outputs(seat, context)
        if sent == script.cut_after:
            if script.cut_code is not None:
                await context.abort(script.cut_code, "scripted")
            return
        await script.ending.passed(seat.stopped)
        await context.write(decode_pb2.DecodeResponse(ended=self._ended(seat, sent)))

    def _grant(self, seat: FakeSeat) -> grant_pb2.Grant:
        grant_id = next(_grants).to_bytes(16, "big")
        self.grants[grant_id] = seat
        return grant_pb2.Grant(
            grant_id=grant_id,
            key=seat.opening.key,
            decode=grant_pb2.Peer(member=self.name, incarnation=self.incarnation, address=self.address),
            layout_fingerprint="f" * 32,
            token_count=len(seat.opening.prompt_token_ids),
            expires_after_s=30.0,
        )

    async def _outputs(self, seat: FakeSeat, context: grpc.aio.ServicerContext) -> int:
        script, opening = self.script, seat.opening
        quiet = opening.output_mode == pb.OUTPUT_MODE_FINAL_ONLY
        for index in range(min(script.tokens, opening.max_output_tokens)):
            if index == script.cut_after:
                return index
            await script.output.passed(seat.stopped)
            if seat.stopped.is_set():
                return index
            number = opening.first_sequence_no + index
            text = script.text(index)
            delta = pb.Delta(text=text, token_ids=[index])
            response = b"" if quiet else pb.GenerateResponse(sequence_no=number, delta=delta).SerializeToString()
            output = decode_pb2.Output(
                response=response,
                next_sequence_no=number + 1,
                selected_token_ids=[index],
                text_bytes=0 if quiet else len(text.encode()),
                returned_tokens=0 if quiet else 1,
            )
            await context.write(decode_pb2.DecodeResponse(output=output))
        return min(script.tokens, opening.max_output_tokens)

    def _ended(self, seat: FakeSeat, sent: int) -> decode_pb2.Ended:
        opening, prompt = seat.opening, len(seat.opening.prompt_token_ids)
        usage = pb.Usage(
            prompt_tokens=prompt,
            selected_tokens=sent,
            processed_tokens=prompt + max(0, sent - 1) if sent else 0,
            returned_tokens=sent,
            billed_tokens=sent,
        )
        ended = decode_pb2.Ended(
            usage=usage, next_sequence_no=opening.first_sequence_no + sent, decode_s=0.01, released={"pages": 2}
        )
        if seat.stopped.is_set():
            ended.cancel_observed_s, ended.cancel_effective_s = 0.001, 0.002
            if seat.reason == "deadline_exceeded":
                ended.finish_reason, ended.cause = pb.FINISH_REASON_DEADLINE_EXCEEDED, "overall_deadline"
            elif seat.reason in ("cancelled", "client_gone"):
                ended.finish_reason = pb.FINISH_REASON_CANCELLED
            else:
                ended.finish_reason, ended.cause = pb.FINISH_REASON_TRANSPORT_ERROR, seat.reason
            return ended
        if opening.output_mode == pb.OUTPUT_MODE_FINAL_ONLY:
            ended.text = "".join(self.script.text(index) for index in range(sent))
        for key, value in self.script.ended.items():
            setattr(ended, key, value)
        return ended


@dataclass
class PrefillScript:
    """What the prefill fake does with its next jobs."""

    compute: Gate = field(default_factory=Gate)
    failures: deque[prefill_pb2.PrefillFailed | grpc.StatusCode] = field(default_factory=deque)
    #: As `failures`, but everything was written before.
    late_failures: deque[prefill_pb2.PrefillFailed | grpc.StatusCode] = field(default_factory=deque)


class FakePrefill(FakeMember, prefill_pb2_grpc.PrefillServiceServicer, member_pb2_grpc.MemberServiceServicer):
    """A prefill member that hands over to `decodes`."""

    role = member_pb2.MEMBER_ROLE_PREFILL

    def __init__(self, name: str, decodes: list[FakeDecode]) -> None:
        super().__init__(name)
        self.script = PrefillScript()
        self.jobs: set[bytes] = set()
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self._decodes = decodes

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        self.requests.append(request)
        grant_id = request.grant.grant_id
        self.jobs.add(grant_id)
        try:
            accepted = prefill_pb2.PrefillAccepted(queued_tokens=0)
            await context.write(prefill_pb2.PrefillResponse(accepted=accepted))
            await self.script.compute.passed()
            if self.script.failures:
                await self._fail(self.script.failures.popleft(), context)
                return
            for decode in self._decodes:
                if grant_id in decode.grants:
                    decode.grants.pop(grant_id).committed.set()
            if self.script.late_failures:
                await self._fail(self.script.late_failures.popleft(), context)
                return
            committed = prefill_pb2.PrefillCommitted(
                sent_bytes=1000, queue_s=0.001, compute_s=0.004, handover_s=0.003, exposed_s=0.001, post_s=0.0005
            )
            await context.write(prefill_pb2.PrefillResponse(committed=committed))
        finally:
            self.jobs.discard(grant_id)

    async def _fail(self, failure: prefill_pb2.PrefillFailed | grpc.StatusCode, context: grpc.aio.ServicerContext) -> None:
        if isinstance(failure, grpc.StatusCode):
            await context.abort(failure, "scripted")
        await context.write(prefill_pb2.PrefillResponse(failed=failure))


@asynccontextmanager
async def fake_pools(
    prefills: int = 1, decodes: int = 1, decode_info: dict[str, object] | None = None
) -> AsyncIterator[tuple[list[FakePrefill], list[FakeDecode]]]:
    """Started fakes; `decode_info` changes what the decode members say they are."""
    decode = [FakeDecode(f"decode-{number}") for number in range(decodes)]
    prefill = [FakePrefill(f"prefill-{number}", decode) for number in range(prefills)]
    for one in decode:
        one.info_changes.update(decode_info or {})
    members: list[FakeMember] = [*decode, *prefill]
    try:
        for member in members:
            await member.start()
        yield prefill, decode
    finally:
        for member in members:
            await member.stop()

"""A decode member for router tests: it says what a script tells it to, goes on after earlier attempts, and can be adopted."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from router.seat import TAKEN
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc, grant_pb2, member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tests import fake_choices, fake_log_probs
from tests.fake_member import FakeMember, Gate, first_of

#: Outputs that a seat without a reader makes before it waits for one.
WINDOW_OUTPUTS = 64

_grants = itertools.count(1)


@dataclass(eq=False)
class FakeSeat:
    """One seat: what it said so far, and the call that reads it, if there is one."""

    opening: decode_pb2.Open
    opened_at: float = field(default_factory=time.monotonic)
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    #: Its router has its end, and needs it no more.
    taken: bool = False
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    pushed: asyncio.Event = field(default_factory=asyncio.Event)
    push: decode_pb2.PushSeat | None = None
    reason: str = ""
    #: Choices that are to end alone.
    cancelled: set[int] = field(default_factory=set)
    said: list[decode_pb2.DecodeResponse] = field(default_factory=list)
    finished: bool = False
    reader: object = None
    written: int = 0
    task: "asyncio.Task[None] | None" = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def key(self) -> tuple[str, int]:
        """Whose it is."""
        return self.opening.key.request_id, self.opening.key.attempt

    async def say(self, event: decode_pb2.DecodeResponse) -> None:
        """Returns when the reader has it; without one, when it fits into the window."""
        self.said.append(event)
        place = len(self.said)
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.written >= (place if self.reader else place - WINDOW_OUTPUTS))

    async def tell(self) -> None:
        """Whoever waits looks again."""
        async with self.changed:
            self.changed.notify_all()

    def event(self, kind: str) -> decode_pb2.DecodeResponse | None:
        """What it said of a kind, the last one."""
        return next((event for event in reversed(self.said) if event.WhichOneof("event") == kind), None)


@dataclass
class DecodeScript:
    """What the decode fake does with its next seats. `tokens` and `text` count from the request's first token."""

    refusals: deque[decode_pb2.Refused] = field(default_factory=deque)
    tokens: int = 3
    text: Callable[[int], str] = lambda index: f"t{index} "
    #: How long a call may go without its first message; None is for ever.
    first_message_s: float | None = None
    grant: Gate = field(default_factory=Gate)
    commit: Gate = field(default_factory=Gate)
    output: Gate = field(default_factory=Gate)
    ending: Gate = field(default_factory=Gate)
    adopting: Gate = field(default_factory=Gate)
    #: Prompt tokens that it has already.
    cached_tokens: int = 0
    #: End the stream after so many outputs, without an Ended; `cut_code` None ends it with OK.
    cut_after: int | None = None
    cut_code: grpc.StatusCode | None = None
    ended: dict[str, object] = field(default_factory=lambda: {"finish_reason": pb.FINISH_REASON_MAX_OUTPUT_TOKENS})
    deaf: bool = False
    #: Whether a paused sequence can be moved, and why writing it fails (empty when it does not).
    pushable: bool = True
    push_failure: str = ""
    push: Gate = field(default_factory=Gate)
    #: What it says about grammars: once `grammar` is open, an answer, or an error.
    grammar: Gate = field(default_factory=Gate)
    verdict: decode_pb2.CheckGrammarResponse | grpc.StatusCode = field(default_factory=decode_pb2.CheckGrammarResponse)


class FakeDecode(FakeMember, decode_pb2_grpc.DecodeServiceServicer, member_pb2_grpc.MemberServiceServicer):
    """A decode member. A seat whose call ends without a cancel lives on for hold_s and can be adopted."""

    role = member_pb2.MEMBER_ROLE_DECODE

    def __init__(self, name: str = "decode-0") -> None:
        super().__init__(name)
        self.script = DecodeScript()
        self.load = member_pb2.MemberLoad(free_pages=1000)
        self.opens: list[decode_pb2.Open] = []
        #: Calls so far, and those that ended because no first message came.
        self.calls = self.silent_calls = 0
        self.adopts: list[decode_pb2.Adopt] = []
        #: Grammars asked about, and how many askers left before the answer.
        self.checks: list[decode_pb2.CheckGrammarRequest] = []
        self.checks_left = 0
        self.metadata: list[dict[str, str]] = []
        self.heard: list[str] = []
        self.seats: set[FakeSeat] = set()
        self.grants: dict[bytes, FakeSeat] = {}
        #: Decode members that sequences can be moved to.
        self.peers: list[FakeDecode] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        await super().stop()
        for seat in list(self.seats):
            await self._drop(seat)

    async def Decode(self, requests: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        self.calls += 1
        try:
            async with asyncio.timeout(self.script.first_message_s):
                first = await context.read()
        except TimeoutError:
            self.silent_calls += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no first message")
        self.metadata.append(dict(context.invocation_metadata()))
        if first.WhichOneof("message") == "adopt":
            await self._adopt(first.adopt, context)
            return
        seat = FakeSeat(first.open)
        self.opens.append(seat.opening)
        self.seats.add(seat)
        seat.task = asyncio.create_task(self._live(seat))
        await self._attend(seat, 0, context)

    async def CheckGrammar(  # noqa: N802
        self, asked: decode_pb2.CheckGrammarRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.CheckGrammarResponse:
        self.checks.append(asked)
        try:
            await self.script.grammar.passed()
        except asyncio.CancelledError:
            self.checks_left += 1
            raise
        if isinstance(self.script.verdict, grpc.StatusCode):
            await context.abort(self.script.verdict, "scripted")
        return self.script.verdict

    async def _adopt(self, adopt: decode_pb2.Adopt, context: grpc.aio.ServicerContext) -> None:
        self.adopts.append(adopt)
        key = (adopt.key.request_id, adopt.key.attempt)
        seat = next((seat for seat in self.seats if seat.key == key), None)
        if adopt.incarnation != self.incarnation or seat is None:
            reason = "unknown_attempt" if adopt.incarnation == self.incarnation else "wrong_incarnation"
            await context.write(decode_pb2.DecodeResponse(refused=decode_pb2.Refused(reason=reason)))
            return
        await self.script.adopting.passed()
        adopted, place = self._adopted(seat, max(1, adopt.next_sequence_no))
        await context.write(decode_pb2.DecodeResponse(adopted=adopted))
        granted = seat.event("granted")
        if granted is not None and seat.event("committed") is None:
            await context.write(granted)
        await self._attend(seat, place, context)

    def _adopted(self, seat: FakeSeat, wanted: int) -> tuple[decode_pb2.Adopted, int]:
        """The answer, and the place in what was said from which it comes again."""
        opening = decode_pb2.Open()
        opening.CopyFrom(seat.opening)
        for name in ("overall_remaining_s", "first_token_remaining_s"):
            if opening.HasField(name):
                setattr(opening, name, max(0.0, getattr(opening, name) - (time.monotonic() - seat.opened_at)))
        adopted = decode_pb2.Adopted(
            open=opening,
            next_sequence_no=wanted,
            output_token_ids=opening.output_token_ids,
            returned_tokens=opening.returned_tokens,
            sent_text_bytes=opening.sent_text_bytes,
            held_log_probabilities=opening.held_log_probabilities,
        )
        committed = seat.event("committed")
        if committed is not None:
            adopted.committed.CopyFrom(committed.committed)
        for place, event in enumerate(seat.said):
            kind = event.WhichOneof("event")
            if opening.choices:
                del adopted.choices[:]
                adopted.choices.extend(fake_choices.adopted(opening, seat.said[:place]))
            text = "".join(self.script.text(index) for index in range(opening.returned_tokens, adopted.returned_tokens))
            adopted.returned = fake_log_probs.returned(opening, opening.returned_tokens, adopted.returned_tokens, text)
            if kind == "ended" or (kind == "output" and event.output.response and event.output.next_sequence_no > wanted):
                return adopted, place
            if kind == "output" and not opening.choices:
                adopted.output_token_ids.extend(event.output.selected_token_ids)
                adopted.returned_tokens += event.output.returned_tokens
                adopted.sent_text_bytes += event.output.text_bytes
                adopted.held_log_probabilities.extend(event.output.held_log_probabilities)
        if opening.choices:
            del adopted.choices[:]
            adopted.choices.extend(fake_choices.adopted(opening, seat.said))
        return adopted, len(seat.said)

    async def _attend(self, seat: FakeSeat, place: int, context: grpc.aio.ServicerContext) -> None:
        """One call for as long as it lives; it may take the seat from another one."""
        me = seat.reader = object()
        seat.written = place
        await seat.tell()
        listening = asyncio.create_task(self._listen(seat, context))
        try:
            await self._pump(seat, me, context)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            if seat.reader is me:
                await self._left(seat)

    async def _pump(self, seat: FakeSeat, me: object, context: grpc.aio.ServicerContext) -> None:
        while seat.reader is me:
            if seat.written < len(seat.said):
                event = seat.said[seat.written]
                await context.write(event)
                if seat.reader is me:
                    seat.written += 1
                    await seat.tell()
            elif seat.finished:
                if seat.opening.hold_s > 0 and seat.event("ended") is not None:
                    async with seat.changed:
                        await seat.changed.wait_for(lambda: seat.reader is not me or seat.taken)
                    if seat.reader is not me:
                        break
                await self._drop(seat)
                if seat.event("ended") is None and seat.event("refused") is None and self.script.cut_code is not None:
                    await context.abort(self.script.cut_code, "scripted")
                return
            else:
                async with seat.changed:
                    await seat.changed.wait_for(lambda: seat.reader is not me or seat.finished or seat.written < len(seat.said))
        await context.abort(grpc.StatusCode.ABORTED, "ADOPTED")

    async def _left(self, seat: FakeSeat) -> None:
        """The call went, or the seat is gone."""
        seat.reader = None
        hold_s = 0.0 if seat.stopped.is_set() and not self.script.deaf else seat.opening.hold_s
        if seat not in self.seats:
            return
        if hold_s <= 0:
            await self._drop(seat)
            return
        await seat.tell()
        asyncio.get_running_loop().call_later(hold_s, self._hold_over, seat)

    def _hold_over(self, seat: FakeSeat) -> None:
        if seat.reader is None and seat in self.seats:
            self.seats.discard(seat)
            if seat.task is not None:
                seat.task.cancel()

    async def _drop(self, seat: FakeSeat) -> None:
        self.seats.discard(seat)
        if seat.task is not None:
            seat.task.cancel()
            await asyncio.gather(seat.task, return_exceptions=True)

    async def _listen(self, seat: FakeSeat, context: grpc.aio.ServicerContext) -> None:
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            kind = request.WhichOneof("message")
            if kind in ("pause", "push"):
                self.heard.append(kind)
                seat.push = request.push if kind == "push" else None
                (seat.pushed if kind == "push" else seat.paused).set()
                continue
            if kind == "keep_end":
                self.heard.append(kind)
                continue
            if kind == "cancel" and request.cancel.HasField("choice"):
                self.heard.append(f"choice {request.cancel.choice}")
                seat.cancelled.add(request.cancel.choice)
                continue
            if kind == "cancel" and request.cancel.reason == TAKEN:
                seat.taken = True
                await seat.tell()
                continue
            seat.reason = request.cancel.reason if kind == "cancel" else request.prefill_lost.cause
            self.heard.append(seat.reason)
            late = kind == "prefill_lost" and seat.committed.is_set()  # a hand-over that is complete can not be lost
            if not self.script.deaf and not late:
                seat.stopped.set()

    async def _live(self, seat: FakeSeat) -> None:
        await self._serve(seat)
        seat.finished = True
        await seat.tell()

    async def _serve(self, seat: FakeSeat) -> None:
        script, opening = self.script, seat.opening
        if opening.incarnation != self.incarnation:
            refused = decode_pb2.Refused(reason="wrong_incarnation", retryable=True)
            await seat.say(decode_pb2.DecodeResponse(refused=refused))
            return
        if script.refusals:
            await seat.say(decode_pb2.DecodeResponse(refused=script.refusals.popleft()))
            return
        lacking = len(opening.prompt_token_ids) - script.cached_tokens
        if opening.HasField("most_computed_tokens") and lacking > opening.most_computed_tokens:
            refused = decode_pb2.Refused(reason="prefix_gone", retryable=True)
            await seat.say(decode_pb2.DecodeResponse(refused=refused))
            return
        await script.grant.passed(seat.stopped)
        granted = decode_pb2.Granted(cached_tokens=script.cached_tokens)
        if opening.HasField("prefill"):
            granted.grant.CopyFrom(self._grant(seat))
        await seat.say(decode_pb2.DecodeResponse(granted=granted))
        if opening.HasField("prefill"):
            await first_of(seat.committed, seat.stopped)
        await script.commit.passed(seat.stopped)
        sent = len(opening.output_token_ids)
        if not seat.stopped.is_set():
            await seat.say(decode_pb2.DecodeResponse(committed=decode_pb2.Committed(handover_s=0.001)))
            sent = await fake_choices.outputs(script, seat) if opening.choices else await self._outputs(seat)
        if seat.paused.is_set() and not seat.stopped.is_set():
            await self._leave(seat, sent)
        elif sent == script.cut_after:
            return
        await script.ending.passed(seat.stopped)
        await seat.say(decode_pb2.DecodeResponse(ended=self._ended(seat, sent)))

    async def _leave(self, seat: FakeSeat, sent: int) -> None:
        """The sequence stands still, and is written into another member's grant when asked."""
        cache_tokens = len(seat.opening.prompt_token_ids) + sent - 1
        paused = decode_pb2.Paused(cache_tokens=cache_tokens, pushable=self.script.pushable)
        await seat.say(decode_pb2.DecodeResponse(paused=paused))
        await first_of(seat.pushed, seat.stopped)
        await self.script.push.passed(seat.stopped)
        if seat.push is not None and not seat.stopped.is_set():
            failure, grant_id = self.script.push_failure, seat.push.grant.grant_id
            if not failure:
                for peer in self.peers:
                    if grant_id in peer.grants:
                        peer.grants.pop(grant_id).committed.set()
            await seat.say(decode_pb2.DecodeResponse(pushed=decode_pb2.Pushed(ok=not failure, cause=failure)))
        await seat.stopped.wait()

    def _grant(self, seat: FakeSeat) -> grant_pb2.Grant:
        grant_id = next(_grants).to_bytes(16, "big")
        self.grants[grant_id] = seat
        return grant_pb2.Grant(
            grant_id=grant_id,
            key=seat.opening.key,
            decode=grant_pb2.Peer(member=self.name, incarnation=self.incarnation, address=self.address),
            layout_fingerprint="f" * 32,
            token_count=len(seat.opening.prompt_token_ids) + len(seat.opening.output_token_ids) - seat.opening.moved,
            expires_after_s=30.0,
        )

    async def _outputs(self, seat: FakeSeat) -> int:
        """Token number i has the id i and the script's text i. Returns how many there are, earlier attempts' included."""
        script, opening = self.script, seat.opening
        quiet = opening.output_mode == pb.OUTPUT_MODE_FINAL_ONLY
        first = len(opening.output_token_ids)
        assert list(opening.output_token_ids) == list(range(first)), "the output of an earlier attempt was not this one's"
        earlier = "".join(script.text(index) for index in range(first)).encode()
        assert opening.sent_text_bytes <= len(earlier), "more text was sent than there was"
        fake_log_probs.check(opening)
        undelivered = earlier[opening.sent_text_bytes :].decode()
        shown = list(range(opening.returned_tokens, first))
        last = min(script.tokens, opening.max_output_tokens)
        for index in range(first, last):
            if index == script.cut_after:
                return index
            await script.output.passed(seat.stopped, seat.paused)
            if seat.stopped.is_set() or seat.paused.is_set():
                return index
            text, ids = (undelivered if index == first else "") + script.text(index), [*shown, index]
            shown = []
            number = opening.first_sequence_no + (0 if quiet else index - first)
            delta = pb.Delta(text=text, token_ids=ids, log_probabilities=fake_log_probs.of(opening, ids))
            response = b"" if quiet else pb.GenerateResponse(sequence_no=number, delta=delta).SerializeToString()
            output = decode_pb2.Output(
                response=response,
                next_sequence_no=number if quiet else number + 1,
                selected_token_ids=[index],
                text_bytes=0 if quiet else len(text.encode()),
                returned_tokens=0 if quiet else len(ids),
                held_log_probabilities=fake_log_probs.held(opening, [index] if quiet else []),
            )
            await seat.say(decode_pb2.DecodeResponse(output=output))
        return max(first, last)

    def _ended(self, seat: FakeSeat, sent: int) -> decode_pb2.Ended:
        opening, prompt = seat.opening, len(seat.opening.prompt_token_ids)
        usage = pb.Usage(
            prompt_tokens=prompt,
            selected_tokens=sent,
            processed_tokens=prompt + max(0, sent - 1) if sent else 0,
            returned_tokens=sent,
            billed_tokens=sent,
        )
        numbers = [event.output.next_sequence_no for event in seat.said if event.WhichOneof("event") == "output"]
        ended = decode_pb2.Ended(
            usage=usage, next_sequence_no=max([opening.first_sequence_no, *numbers]), decode_s=0.01, released={"pages": 2}
        )
        if seat.stopped.is_set():
            ended.cancel_observed_s, ended.cancel_effective_s = 0.001, 0.002
            ended.finish_reason, ended.cause = _stopped(seat.reason)
            return ended
        if opening.output_mode == pb.OUTPUT_MODE_FINAL_ONLY and not opening.choices:
            ended.text = "".join(self.script.text(index) for index in range(sent))
            ended.returned = fake_log_probs.whole(opening, sent)
        for key, value in self.script.ended.items():
            setattr(ended, key, value)
        return ended


def _stopped(reason: str) -> tuple[pb.FinishReason, str]:
    """How a seat ends for the reason of a CancelSeat or the cause of a PrefillLost."""
    if reason.endswith("_deadline") or reason.startswith("inter_token"):
        return pb.FINISH_REASON_DEADLINE_EXCEEDED, reason
    if reason in ("client_cancel", "client_gone", "detach_timeout", "moved"):
        return pb.FINISH_REASON_CANCELLED, reason
    return pb.FINISH_REASON_TRANSPORT_ERROR, reason

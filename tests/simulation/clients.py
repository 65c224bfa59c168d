"""The clients of a world: each sends its request, does what its plan says, and looks at every event that it gets."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc.aio import AioRpcError

from router.following import LOST_TERMINAL_NO
from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc
from tests.simulation.channel import Channel
from tests.simulation.choices_seen import ChoicesSeen
from tests.simulation.client_plans import Behaviour, ClientPlan
from tests.simulation.loop import Process
from tests.simulation.tenants import CONCURRENCY, metadata_of
from tests.simulation.told_text import most_returned, output_of, text_fault, usual_reason
from tests.simulation.wires import FRAME_BYTES, Network

#: Seconds that a cancel with `wait`, or a Get, may take.
CALL_S = 40.0
#: Calls that one client makes for one request.
MOST_CALLS = 6


@dataclass(slots=True)
class CancelSeen:
    """One cancel: when it was sent and answered, and the answer. Times are virtual seconds."""

    sent_at: float
    answered_at: float = 0.0
    answer: Any = None
    wait: bool = False
    router: int = 0


@dataclass(slots=True)
class Seen:
    """What one client saw. `status` is None while a call is open; `left`: it went by itself and is away, `went`: at some time.

    `back_at`: when it came back last. `gap`: it has the end, but not all before it. `taken`: when it took each event, and how
    many bytes of the window that gave back. `refused`: its tenant had too much, and it was to come again.
    """

    plan: ClientPlan
    sent_at: float = 0.0
    back_at: float = 0.0
    ended_at: float = 0.0
    next_number: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    started: Any = None
    completed: Any = None
    status: grpc.StatusCode | None = None
    reason: str = ""
    left: bool = False
    calls: int = 0
    went: bool = False
    gap: bool = False
    refused: bool = False
    events: dict[int, Any] = field(default_factory=dict)
    taken: list[tuple[float, int]] = field(default_factory=list)
    cancels: list[CancelSeen] = field(default_factory=list)
    record: Any = None
    choices: ChoicesSeen | None = None

    @property
    def over(self) -> bool:
        """Whether its call has ended, by the server's word or its own."""
        return self.status is not None or self.left


class Clients(Process):
    """All clients, in one process. `faults` gets sentences, `note` the history of a request.

    forgets: an id may be served twice, because everybody who knew it can be gone, or is asked to serve without knowing.
    """

    def __init__(self, network: Network, plans: tuple[ClientPlan, ...], routers: int, note: Any, forgets: bool = False) -> None:
        super().__init__("clients")
        self._forgets = forgets
        self.faults: list[str] = []
        self.seen = {plan.request_id: Seen(plan) for plan in plans}
        self.references = {plan.request_id: plan.reference() for plan in plans}
        for seen in self.seen.values():
            if seen.plan.best_of > 1:
                seen.choices = _choices_of(seen.plan)
        self.routers = routers
        self._network = network
        self._note = note
        self._stubs: dict[int, Any] = {}
        self._live: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Every client waits for its moment."""
        loop = self._network.loop
        for seen in self.seen.values():
            self._live.append(loop.create_task(self._request(seen), context=self.context.copy()))
            for choice, cancel in [*((None, one) for one in seen.plan.cancels), *seen.plan.choice_cancels]:
                when = max(0.0, seen.plan.at_s + cancel.after_s)
                self._live.append(loop.create_task(self._cancel(seen, when, cancel, choice), context=self.context.copy()))

    async def done(self, timeout_s: float) -> None:
        """Waits for all of them. What breaks in one is a mistake of the simulator."""
        done, late = await asyncio.wait(self._live, timeout=timeout_s)
        for task in done:
            task.result()
        self.faults += [f"{seen.plan.request_id} got no end in time" for seen in self.seen.values() if not seen.over]
        if late and not self.faults:
            self.faults.append("a cancel was not answered in time")

    def stub(self, router: int) -> Any:
        """A router as clients reach it."""
        if router not in self._stubs:
            channel = Channel(self._network, f"router-{router}:1")
            self._stubs[router] = inference_pb2_grpc.InferenceServiceStub(channel)
        return self._stubs[router]

    async def _request(self, seen: Seen) -> None:
        """From the request to its end, over as many calls as it takes."""
        plan, loop = seen.plan, asyncio.get_running_loop()
        await asyncio.sleep(plan.at_s)
        seen.sent_at = loop.time()
        call = self.stub(plan.router).Generate(plan.request(), timeout=plan.timeout_s, metadata=metadata_of(plan))
        self._note(plan.request_id, f"sent to router-{plan.router}")
        first = 0
        await self._one_call(seen, call, first)
        for times in range(1, MOST_CALLS):
            if seen.completed is not None or plan.back_after_s is None or not self._comes_back(seen):
                break
            await asyncio.sleep(plan.back_after_s * times)
            seen.status, seen.left = None, False
            first = 0 if plan.back_by_generate or not seen.events else seen.next_number
            await self._one_call(seen, self._again(seen, plan.router + times, first), first)
        seen.ended_at = loop.time()
        if plan.replays and seen.completed is not None:
            status, reason = seen.status, seen.reason
            # Where everybody can have forgotten the request, what comes may be another run of it.
            told = Seen(plan, calls=seen.calls) if self._forgets else seen
            if told is not seen and seen.choices is not None:
                told.choices = _choices_of(plan)
            await self._one_call(told, self._again(seen, plan.router, 0), 0)
            seen.status, seen.reason = status, reason
        self._look_at_end(seen)

    def _again(self, seen: Seen, router: int, first: int) -> Any:
        """Takes the stream up again."""
        plan = seen.plan
        stub = self.stub(router % self.routers)
        seen.back_at = asyncio.get_running_loop().time()
        self._note(plan.request_id, f"back at router-{router % self.routers} from {first}")
        if plan.back_by_generate or not seen.events:
            return stub.Generate(plan.request(), metadata=metadata_of(plan))
        return stub.Attach(pb.AttachRequest(request_id=plan.request_id, next_sequence_no=first), metadata=metadata_of(plan))

    def _comes_back(self, seen: Seen) -> bool:
        """Whether another call may bring more."""
        return seen.left or seen.status is grpc.StatusCode.UNAVAILABLE or seen.reason == CONCURRENCY

    async def _one_call(self, seen: Seen, call: Any, first: int) -> None:
        """One stream, from event `first` on."""
        seen.calls += 1
        seen.status, seen.reason = None, ""
        timer = None
        if seen.calls == 1 and seen.plan.gives_up_after_s is not None:
            timer = asyncio.get_running_loop().call_later(seen.plan.gives_up_after_s, self._give_up, seen, call)
        try:
            await self._read(seen, call, first)
        except asyncio.CancelledError:
            if not seen.left:
                raise
        except AioRpcError as error:
            seen.status, seen.reason = error.code(), details_from(error).reason
            seen.refused = seen.refused or seen.reason == CONCURRENCY
        else:
            if not seen.left:
                seen.status = grpc.StatusCode.OK
        if timer is not None:
            timer.cancel()
        self._note(seen.plan.request_id, f"its call ended: {'it left' if seen.left else seen.status} {seen.reason}")
        if seen.status is grpc.StatusCode.OK and seen.completed is None:
            self._wrong(seen, "its call ended well without a terminal event")

    @staticmethod
    def _give_up(seen: Seen, call: Any) -> None:
        """Nothing has come."""
        if not seen.events and not call.done():
            seen.left = seen.went = True
            call.cancel()

    async def _read(self, seen: Seen, call: Any, first: int) -> None:
        plan, events, expected = seen.plan, 0, first
        async for event in call:
            kind = event.WhichOneof("event")
            seen.taken.append((asyncio.get_running_loop().time(), event.ByteSize() + FRAME_BYTES))
            stored_end = kind == "completed" and seen.calls > 1 and event.sequence_no > expected
            if event.sequence_no != expected and not stored_end:
                self._wrong(seen, f"event {event.sequence_no} came where {expected} was next")
            expected = event.sequence_no + 1
            seen.gap = seen.gap or (stored_end and event.sequence_no > seen.next_number)
            self._take(seen, event, kind)
            events += 1
            if plan.behaviour is Behaviour.SLOW and plan.pause_s:
                await asyncio.sleep(plan.pause_s)
            leaves = plan.behaviour is Behaviour.LEAVE and seen.calls == 1
            if leaves and events > plan.leave_after_events and seen.completed is None:
                seen.left = seen.went = True
                call.cancel()
                return

    async def _cancel(self, seen: Seen, when: float, cancel: Any, choice: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(when)
        mine = CancelSeen(loop.time(), wait=cancel.wait, router=cancel.router)
        request = pb.CancelRequest(request_id=seen.plan.request_id, wait=cancel.wait, choice=choice)
        what = "cancel" if choice is None else f"cancel of choice {choice}"
        self._note(seen.plan.request_id, f"{what} sent to router-{cancel.router}")
        try:
            mine.answer = await self.stub(cancel.router).Cancel(request, timeout=CALL_S)
        except AioRpcError as error:
            self._note(seen.plan.request_id, f"cancel failed: {error.code().name}")
            return
        mine.answered_at = loop.time()
        if choice is None:
            seen.cancels.append(mine)
        self._note(seen.plan.request_id, f"cancel answered: {str(mine.answer).split()}")

    # looking

    def _wrong(self, seen: Seen, what: str) -> None:
        self.faults.append(f"{seen.plan.request_id}: {what}")

    def _take(self, seen: Seen, event: Any, kind: str) -> None:
        number = event.sequence_no
        self._note(seen.plan.request_id, f"event {number} {kind}")
        if kind == "started" and self._forgets and seen.completed is None:
            # Perhaps another run: what came of the first is not continued.
            seen.next_number, seen.text, seen.tokens, seen.log_probs, seen.events = 0, "", [], [], {}
            if seen.choices is not None:
                seen.choices.forget()
        # The end that the store has of a request whose router died bears the number that was asked for.
        lost = kind == "completed" and seen.completed is None and seen.calls > 1
        if number < seen.next_number and not lost:
            self._repeated(seen, event, kind)
            return
        if kind == "completed" and seen.completed is not None and number == LOST_TERMINAL_NO:
            self._told_as_stored(seen, event.completed)
            return
        seen.next_number = max(seen.next_number, number + 1)
        seen.events[number] = event
        if seen.completed is not None:
            self._wrong(seen, f"{kind} after the terminal event")
        if (kind == "started") != (number == 0 and kind != "completed"):
            self._wrong(seen, f"{kind} has number {number}")
        before = seen.text
        if kind == "started":
            seen.started = event.started
        elif kind == "completed":
            seen.completed = event.completed
            asked = seen.plan.echo or seen.plan.scores_prompt
            if asked and event.completed.token_ids and seen.calls == 1 and 1 not in seen.events:
                self._wrong(seen, "its output came without its prompt")
            if seen.choices is not None:
                return
            self._add(seen, event.completed, whole=False)
        elif seen.choices is not None and kind in ("delta", "choice_ended"):
            told = getattr(event, kind)
            if seen.plan.echo and number == 1 and told.token_ids:
                self._wrong(seen, "its output came before its prompt")
            for fault in seen.choices.take(kind, told, cumulative=seen.plan.cumulative):
                self._wrong(seen, fault)
            seen.tokens += told.token_ids
            return
        elif kind == "prompt":
            self._look_at_prompt(seen, number, event.prompt)
        else:
            if seen.plan.echo and number == 1:
                self._wrong(seen, "its output came before its prompt")
            self._add(seen, event.delta, whole=event.delta.cumulative)
            if event.delta.cumulative != seen.plan.cumulative:
                self._wrong(seen, f"cumulative is {event.delta.cumulative} in event {number}")
        reference, same_run = self.references[seen.plan.request_id], not (self._forgets and seen.calls > 1)
        if fault := text_fault(reference, before, seen.text, seen.completed, same_run=same_run):
            self._wrong(seen, fault)

    def _look_at_prompt(self, seen: Seen, number: int, event: Any) -> None:
        plan, known = seen.plan, self.references[seen.plan.request_id].prompt_log_probs
        told = [_told(one) for one in event.log_probabilities]
        right = told == ([(one.value, one.top_ids, one.top_values) for one in known if one] if plan.scores_prompt else [])
        right = right and event.text == (bytes(plan.prompt).decode() if plan.echo else "")
        if not right or number != 1 or tuple(event.token_ids) != plan.prompt:
            self._wrong(seen, f"event {number} tells of the prompt {event}")

    def _add(self, seen: Seen, event: Any, *, whole: bool) -> None:
        """Output that an event brings; with `whole` it is all so far."""
        if whole and not event.text.startswith(seen.text):
            self._wrong(seen, f"{event.text!r} does not go on after {seen.text!r}")
        seen.text = event.text if whole else seen.text + event.text
        for all_of, new in ((seen.tokens, event.token_ids), (seen.log_probs, event.log_probabilities)):
            if whole:
                all_of.clear()
            all_of.extend(new)
        reference = self.references[seen.plan.request_id]
        if seen.plan.log_probs is None:
            right = not seen.log_probs
        else:
            right = len(seen.log_probs) == len(seen.tokens)
            told = [_told(one) for one in event.log_probabilities]
            known = reference.log_probs[len(seen.log_probs) - len(told) : len(seen.log_probs)]
            right = right and told == [(one.value, one.top_ids, one.top_values) for one in known if one is not None]
        if not right:
            self._wrong(seen, f"log-probabilities {seen.log_probs} of {seen.tokens}, of {reference.log_probs}")

    def _repeated(self, seen: Seen, event: Any, kind: str) -> None:
        """An event that came before is what it was."""
        if self._forgets:
            return
        if seen.gap and event.sequence_no not in seen.events:
            # The end came without it from a router that could not know who had it: nothing to compare with before all is there.
            seen.events[event.sequence_no] = event
            return
        known = seen.events.get(event.sequence_no)
        if kind == "completed" and seen.completed is not None:
            one, other = seen.completed, event.completed
            # Without text, where output comes with the end alone, an end is not the one that was told.
            same = all(
                getattr(one, name) == getattr(other, name) for name in ("finish_reason", "state", "cause", "text", "token_ids")
            )
        else:
            same = known == event
        if not same:
            self._wrong(seen, f"event {event.sequence_no} was {known}, then {event}")

    def _told_as_stored(self, seen: Seen, end: Any) -> None:
        """Who asks from the start after the end of a request that was ended for dead gets that end as the store has it: nobody
        can know whether its router had told more. It is the same end, and has no text of its own."""
        same = all(getattr(end, name) == getattr(seen.completed, name) for name in ("finish_reason", "state", "cause"))
        if not (self._forgets or (same and not end.text and not end.token_ids)):
            self._wrong(seen, f"it ended with {seen.completed}, then with {end}")

    def _look_at_end(self, seen: Seen) -> None:
        if seen.left or seen.completed is None:
            return
        if seen.choices is not None:
            for fault in seen.choices.at_end(seen.completed) if not (seen.gap or (self._forgets and seen.calls > 1)) else ():
                self._wrong(seen, fault)
            return
        if seen.gap:
            filled = output_of(seen.events)
            if filled is None:
                return
            seen.text, seen.tokens = filled
            if fault := text_fault(self.references[seen.plan.request_id], "", seen.text, seen.completed):
                self._wrong(seen, fault)
        reference, completed = self.references[seen.plan.request_id], seen.completed
        usual = usual_reason(reference)
        if completed.state == pb.REQUEST_STATE_FINISHED and completed.finish_reason != pb.FINISH_REASON_DEADLINE_EXCEEDED:
            if seen.text != reference.text:
                self._wrong(seen, f"finished with {seen.text!r} instead of {reference.text!r}")
            if completed.finish_reason != usual:
                self._wrong(seen, f"finish reason {completed.finish_reason} instead of {usual}")
            for name in ("prompt_tokens", "selected_tokens", "returned_tokens", "billed_tokens"):
                told, right = getattr(completed.usage, name), getattr(reference.usage, name)
                if told != right:
                    self._wrong(seen, f"{name} is {told}, must be {right}")
        elif completed.usage.returned_tokens > (most := most_returned(reference, completed)):
            self._wrong(seen, f"{completed.usage.returned_tokens} tokens returned of {most}")
        # A request that another router has ended for dead has no counts: checks.py says when that may be.
        counted = not seen.plan.final_only and completed.HasField("usage") and not (self._forgets and seen.calls > 1)
        if counted and completed.usage.returned_tokens != len(seen.tokens):
            self._wrong(seen, f"{len(seen.tokens)} tokens came, {completed.usage.returned_tokens} are counted as returned")


def _choices_of(plan: ClientPlan) -> ChoicesSeen:
    references = [plan.reference(index) for index in range(plan.best_of)]
    cancelled = frozenset(choice for choice, _ in plan.choice_cancels)
    return ChoicesSeen(references, plan.choices, plan.log_probs, cancelled)


def _told(one: Any) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    return one.log_probability, tuple(one.top_token_ids), tuple(one.top_log_probabilities)

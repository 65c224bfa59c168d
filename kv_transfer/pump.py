"""The transfer threads. Each owns one end of a transport wholly: it is made, used and closed on that thread and nowhere else.

Others speak to a pump by queues and get their answers by callbacks, which run on the pump's thread and must only hand over (put
into an inbox). NIXL has no event to wait for, so a pump polls: often while something is expected, rarely when idle.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kv_transfer.offer import Endpoint, HandoverError
from kv_transfer.ports import (
    CAUSE_CLOSED,
    CAUSE_NOT_CONNECTED,
    CAUSE_STALE,
    CAUSE_WITHDRAWN,
    Push,
    PushResult,
    ReceiveFailed,
    Receiver,
    Sender,
    SendFailed,
)
from kv_transfer.pump_thread import ARMED_POLL_S, PumpStopped, PumpThread, waiting_poll_s, writing_poll_s
from rpc import clocks

__all__ = ["PumpFull", "PumpStopped", "ReceivePump", "ReceiveStatistics", "SendLimits", "SendPump", "SendStatistics"]

IDLE_POLL_S = 5e-3
# With nothing in flight a sender has nothing to poll for; what is asked of it wakes it.
IDLE_SEND_S = 0.5
QUEUED_PUSHES_MAX = 4096
REQUESTS_MAX = 4096
# Failed connections whose cause is remembered.
REFUSED_MAX = 256
IN_FLIGHT_PER_PEER_MAX = 32
IN_FLIGHT_MAX = 256
# A push that waited for so long was queued by a process that slept since: others may have acted without it.
QUEUE_AGE_S = 10.0


class PumpFull(HandoverError):
    """The bound on queued pushes is met: submit again after some results."""

    def __init__(self, bound: int) -> None:
        super().__init__(f"{bound} pushes are queued: submit again when some have ended")
        self.bound = bound


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Bounds of a send pump. Counts of pushes, and the age in seconds at which a queued push is dropped."""

    queued_pushes: int = QUEUED_PUSHES_MAX
    in_flight_per_peer: int = IN_FLIGHT_PER_PEER_MAX
    in_flight: int = IN_FLIGHT_MAX
    queue_age_s: float = QUEUE_AGE_S


@dataclass(slots=True)
class SendStatistics:
    """Since the start: pushes and bytes that arrived, seconds from post to end and inside posting (summed), failures by cause.

    Now: pushes queued and in flight, receiving agents connected.
    """

    pushes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    queued: int = 0
    in_flight: int = 0
    peers: int = 0


@dataclass(slots=True)
class ReceiveStatistics:
    """Since the start: notices, fences done, fences that could not be proven. Now: receiving agents."""

    notices: int = 0
    fences: int = 0
    unproven_fences: int = 0
    writers: int = 0


@dataclass(frozen=True, slots=True)
class _Queued:
    push: Push
    queued_at: float


@dataclass(frozen=True, slots=True)
class _Posted:
    push: Push
    posted_at: float


class SendPump(PumpThread[Sender]):
    """The writer's transfer thread.

    deliver: gets the results of pushes; each submitted push has exactly one. on_crash: gets what ended the thread.
    """

    def __init__(
        self,
        make_sender: Callable[[], Sender],
        deliver: Callable[[list[PushResult]], None],
        on_crash: Callable[[BaseException], None],
        limits: SendLimits | None = None,
    ) -> None:
        super().__init__("send-pump", make_sender, on_crash)
        self._deliver = deliver
        self._limits = limits or SendLimits()
        self._door = threading.Lock()  # around what callers write, down to _shut
        self._endpoints: dict[str, Endpoint] = {}
        self._submitted: deque[_Queued] = deque()
        self._withdrawn: set[int] = set()
        self._waiting = 0  # pushes submitted and not posted
        self._shut = False  # set when nobody will look at a submitted push again
        # From here on only the pump's thread writes.
        self._queues: dict[str, deque[_Queued]] = {}
        self._posted: dict[int, _Posted] = {}
        self._refused: dict[str, SendFailed] = {}
        self._results: list[PushResult] = []
        self._cut_off = 0
        self._moved_at = 0.0
        self._stats = SendStatistics()

    def connect(self, endpoint: Endpoint) -> None:
        """Learn a receiving agent before the first push to it. A failure shows as the cause of its pushes. Raises PumpStopped."""
        self._check_running()
        with self._door:
            self._endpoints[endpoint.agent] = endpoint
        self._wake.set()

    def submit(self, push: Push) -> None:
        """Queue a push; pushes to one agent are posted in order. Raises PumpFull, or PumpStopped."""
        self._check_running()
        with self._door:
            if self._shut:
                raise PumpStopped("the send pump is closed")
            if self._waiting >= self._limits.queued_pushes:
                raise PumpFull(self._limits.queued_pushes)
            self._waiting += 1
            self._submitted.append(_Queued(push, clocks.monotonic()))
        self._wake.set()

    def withdraw(self, push_ids: Iterable[int]) -> None:
        """Drop pushes that are not posted yet. Those that are run on to their end: a write cannot be aborted."""
        with self._door:
            self._withdrawn.update(push_ids)
        self._wake.set()

    def statistics(self) -> SendStatistics:
        """A copy of the counts."""
        s = self._stats
        return SendStatistics(
            s.pushes, s.sent_bytes, s.seconds, s.post_seconds, dict(s.failures), self._waiting, len(self._posted), s.peers
        )

    def _turn(self, end: Sender) -> float:
        self._take(end)
        self._post(end)
        self._poll(end)
        self._stats.peers = end.peers
        self._hand_over()
        return writing_poll_s(clocks.monotonic() - self._moved_at) if self._posted or self._queues else IDLE_SEND_S

    def _take(self, end: Sender) -> None:
        with self._door:
            endpoints, self._endpoints = list(self._endpoints.values()), {}
            submitted, self._submitted = list(self._submitted), deque()
            withdrawn, self._withdrawn = self._withdrawn, set()
        for endpoint in endpoints:
            try:
                end.connect(endpoint)
                self._refused.pop(endpoint.agent, None)
            except SendFailed as failure:
                self._refused.pop(endpoint.agent, None)
                self._refused[endpoint.agent] = failure
                if len(self._refused) > REFUSED_MAX:
                    del self._refused[next(iter(self._refused))]
        for one in submitted:
            self._queues.setdefault(one.push.agent, deque()).append(one)
        if withdrawn:
            self._drop(lambda one: one.push.push_id in withdrawn, CAUSE_WITHDRAWN)

    def _post(self, end: Sender) -> None:
        """Post from each peer's queue in turn, within the bounds."""
        busy = Counter(p.push.agent for p in self._posted.values())
        self._drop_stale(clocks.monotonic() - self._limits.queue_age_s)
        turns = deque(self._queues)
        while turns and len(self._posted) < self._limits.in_flight:
            agent = turns.popleft()
            if busy[agent] >= self._limits.in_flight_per_peer:
                continue
            queue = self._queues[agent]
            self._post_one(end, queue.popleft().push)
            busy[agent] += 1
            if queue:
                turns.append(agent)
            else:
                del self._queues[agent]

    def _post_one(self, end: Sender, push: Push) -> None:
        began = clocks.monotonic()
        try:
            end.post(push)
        except SendFailed as failure:
            told = self._refused.get(push.agent, failure) if failure.cause == CAUSE_NOT_CONNECTED else failure
            self._answer(PushResult(push.push_id, False, told.cause, told.detail))
            return
        with self._door:
            self._waiting -= 1
        self._posted[push.push_id] = _Posted(push, began)
        self._moved_at = clocks.monotonic()
        self._stats.post_seconds += self._moved_at - began

    def _poll(self, end: Sender) -> None:
        if not self._posted:
            return
        for result in end.poll():
            posted = self._posted.pop(result.push_id)
            self._moved_at = clocks.monotonic()
            self._stats.seconds += self._moved_at - posted.posted_at
            if result.ok:
                self._stats.pushes += 1
                self._stats.sent_bytes += posted.push.size_bytes
            self._note(result)

    def _drop_stale(self, oldest: float) -> None:
        for agent, queue in list(self._queues.items()):
            while queue and queue[0].queued_at < oldest:
                push_id = queue.popleft().push.push_id
                self._answer(PushResult(push_id, False, CAUSE_STALE, f"waited above {self._limits.queue_age_s} s"))
            if not queue:
                del self._queues[agent]

    def _drop(self, matches: Callable[[_Queued], bool], cause: str) -> None:
        """Answer the queued pushes that match: nothing of them is or will be written."""
        for agent in list(self._queues):
            queue = self._queues[agent]
            dropped = [one for one in queue if matches(one)]
            if not dropped:
                continue
            self._queues[agent] = deque(one for one in queue if not matches(one))
            if not self._queues[agent]:
                del self._queues[agent]
            for one in dropped:
                self._answer(PushResult(one.push.push_id, False, cause, "not posted"))

    def _answer(self, result: PushResult) -> None:
        """End a push that was never posted."""
        with self._door:
            self._waiting -= 1
        self._note(result)

    def _note(self, result: PushResult) -> None:
        if not result.ok:
            self._stats.failures[result.cause] = self._stats.failures.get(result.cause, 0) + 1
        self._results.append(result)

    def _hand_over(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._deliver(results)

    def _finish(self, end: Sender) -> None:
        self._take(end)
        self._drop(lambda _: True, CAUSE_CLOSED)
        self._hand_over()
        while self._posted and clocks.monotonic() < self._stop_by:
            self._poll(end)
            self._hand_over()
            time.sleep(ARMED_POLL_S)

    def _closed(self) -> None:
        """What was still in flight was cut off with the agent; what was submitted while closing is answered too."""
        with self._door:
            self._shut = True
            late = list(self._submitted)
        for one in late:
            self._answer(PushResult(one.push.push_id, False, CAUSE_CLOSED, "not posted"))
        self._cut_off = len(self._posted)
        for push_id in list(self._posted):
            del self._posted[push_id]
            self._note(PushResult(push_id, False, CAUSE_CLOSED, "cut off by closing the sender"))
        self._hand_over()

    def _settled(self) -> bool:
        return not self._cut_off


@dataclass(frozen=True, slots=True)
class _EndpointRequest:
    writer: str
    callback: Callable[[Endpoint | ReceiveFailed], None]
    displaced: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _FenceRequest:
    writer: str
    callback: Callable[[bool], None]


class ReceivePump(PumpThread[Receiver]):
    """The reader's transfer thread. deliver: gets notices as (writer incarnation, bytes), before any later answer to a fence."""

    def __init__(
        self,
        make_receiver: Callable[[], Receiver],
        deliver: Callable[[list[tuple[str, bytes]]], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        super().__init__("receive-pump", make_receiver, on_crash)
        self._deliver = deliver
        self._requests: deque[_EndpointRequest | _FenceRequest] = deque()
        self._armed = False
        self._moved_at = 0.0
        self._stats = ReceiveStatistics()

    def armed(self, armed: bool) -> None:
        """Whether notices are expected: True while any grant is open."""
        woken = armed and not self._armed
        self._armed = armed
        if woken:
            self._wake.set()

    def request_endpoint(
        self, writer: str, callback: Callable[[Endpoint | ReceiveFailed], None], displaced: Callable[[str], None]
    ) -> None:
        """Get the endpoint for one writer incarnation; the first time its agent is made. Before the answer, `displaced` gets
        each other writer that was fenced to make room. Raises PumpFull, or PumpStopped."""
        self._request(_EndpointRequest(writer, callback, displaced))

    def fence(self, writer: str, callback: Callable[[bool], None]) -> None:
        """Cut a writer incarnation off. callback(True): no write of it can land any more; False: not provable now, ask again.

        Raises PumpFull, or PumpStopped.
        """
        self._request(_FenceRequest(writer, callback))

    def statistics(self) -> ReceiveStatistics:
        """A copy of the counts."""
        s = self._stats
        return ReceiveStatistics(s.notices, s.fences, s.unproven_fences, s.writers)

    def _request(self, request: _EndpointRequest | _FenceRequest) -> None:
        self._check_running()
        if len(self._requests) >= REQUESTS_MAX:
            raise PumpFull(REQUESTS_MAX)
        self._requests.append(request)
        self._wake.set()

    def _turn(self, end: Receiver) -> float:
        notices = end.poll()
        if notices:
            self._moved_at = clocks.monotonic()
            self._stats.notices += len(notices)
            self._deliver(notices)
        for _ in range(len(self._requests)):
            self._serve(end, self._requests.popleft())
        self._stats.writers = end.writers
        return waiting_poll_s(clocks.monotonic() - self._moved_at) if self._armed else IDLE_POLL_S

    def _serve(self, end: Receiver, request: _EndpointRequest | _FenceRequest) -> None:
        if isinstance(request, _FenceRequest):
            fenced = end.fence(request.writer)
            self._stats.fences += fenced
            self._stats.unproven_fences += not fenced
            request.callback(fenced)
            return
        try:
            endpoint: Endpoint | ReceiveFailed = end.endpoint(request.writer)
        except ReceiveFailed as failure:
            endpoint = failure
        for other in end.take_displaced():
            self._stats.fences += 1
            request.displaced(other)
        request.callback(endpoint)

    def _finish(self, end: Receiver) -> None:
        self._turn(end)

    def _closed(self) -> None:
        """Closing an agent cuts its writers off; they learn it by their pushes' failure."""

    def _settled(self) -> bool:
        return True

"""Clients of a round. Each keeps what it got over all of its connections, and fails when it does not fit together."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from router.router_peers import TENANT_KEY
from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.chaos.cancelling import AGAIN_S, Broken, cancelled, channel_to
from tests.chaos.outputs import Output, outputs_of
from tests.chaos.plan import Manner, Order

#: For everything that one client does, reconnecting included.
PATIENCE_S = 75.0
#: A store that forgot a live request is told of it again within that time.
TOLD_AGAIN_S = 15.0
SLOW_S = 0.06
CRAWL_S = 1.0
CRAWL_EVENTS = 4
#: Flow control of a client that does not read: the server may send so much ahead.
NARROW = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))


@dataclass(frozen=True, slots=True)
class Connection:
    """One call of a client and how it ended. `terminal`: it brought the Completed event, and the status after it. `reason` and
    `retry_after_s`: what the router said with a status that is not OK."""

    call: str
    router: int
    terminal: bool
    status: grpc.StatusCode
    said: str = ""
    reason: str = ""
    retry_after_s: float | None = None

    @property
    def refused(self) -> bool:
        """Whether there was no room for the request, which is to come again."""
        return self.status is grpc.StatusCode.RESOURCE_EXHAUSTED and self.reason != "SLOW_CONSUMER"


@dataclass(slots=True)
class Story:
    """What one client got. `several`: it asked for choices. `left`: it went away on purpose and did not come back. `twice`:
    another one asks for the same. `gap`: it knows by the number of its end that it lacks events which went with their router."""

    request_id: str
    several: bool = False
    events: dict[int, pb.GenerateResponse] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    cancels: list[pb.CancelResponse] = field(default_factory=list)
    left: bool = False
    twice: bool = False
    gap: bool = False
    broken: str = ""

    @property
    def completed(self) -> pb.Completed | None:
        """The terminal event."""
        last = self.events.get(max(self.events, default=0))
        return last.completed if last is not None and last.WhichOneof("event") == "completed" else None

    @property
    def over(self) -> bool:
        """Whether it has its end."""
        return self.completed is not None

    @property
    def outputs(self) -> dict[int, Output]:
        """What came of each output, by index. Raises AssertionError when one goes on after its end."""
        return outputs_of([self.events[number] for number in sorted(self.events)], several=self.several)

    @property
    def tokens(self) -> int:
        """Tokens returned so far."""
        return sum(len(event.delta.token_ids) + len(event.choice_ended.token_ids) for event in self.events.values())

    def take(self, event: pb.GenerateResponse, wanted: int) -> None:
        """One event of a connection on which `wanted` is next. Raises Broken."""
        number, kind = event.sequence_no, event.WhichOneof("event")
        if kind == "completed" and wanted == 0 and (self.connections or self.twice) and self.completed is None:
            # Asked again when nothing but its end is known any more; how far its router had come nobody knows (0, or beyond all).
            if 0 < number < len(self.events):
                raise Broken(f"the end alone has number {number} after {len(self.events)} events")
            self.gap = number > len(self.events)
            self.events[number or len(self.events)] = event
            return
        if number != wanted:
            raise Broken(f"event {number} where {wanted} was due")
        # A request that ends before it was admitted has no Started.
        if (kind == "started") != (number == 0) and (kind, number) != ("completed", 0):
            raise Broken(f"{kind} has number {number}")
        known = self.events.get(number)
        if known is not None and not _same(known, event):
            raise Broken(f"event {number} came again and was another: {known} / {event}")
        if known is None and self.completed is not None:
            raise Broken(f"event {number} after the terminal one")
        self.events[number] = event


def _same(one: pb.GenerateResponse, other: pb.GenerateResponse) -> bool:
    if one.WhichOneof("event") == "completed" == other.WhichOneof("event"):
        return bool(one.completed.finish_reason == other.completed.finish_reason and one.completed.state == other.completed.state)
    return one == other


class Client:
    """One client. `run` does everything that its order says; `story` is what came of it."""

    def __init__(
        self,
        order: Order,
        request: pb.GenerateRequest,
        routers: tuple[str, str],
        *,
        attaches: bool,
        forgetful: bool,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`forgetful`: the store loses its memory in this round, and is told again by the request's router."""
        self.order = order
        self.request = request
        self.story = Story(request.request_id, order.shape.several, twice=order.manner is Manner.TWICE)
        #: Set when the first call was made.
        self.asked = asyncio.Event()
        self.done = False
        self._routers = routers
        self._attaches = attaches
        self._forgetful = forgetful
        self._patience_s = patience_s
        self._unknown = 0
        self._acted = False
        self._metadata = ((TENANT_KEY, order.tenant),) if order.tenant else ()
        self._cancelling: asyncio.Task[None] | None = None
        if order.manner is Manner.RETURN:
            request.on_disconnect = pb.ON_DISCONNECT_DETACH
            request.detach_timeout.FromSeconds(30)

    async def run(self) -> Story:
        """Until the terminal event, or until it left, or until a status that is not to be tried again."""
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                await self._run()
            if limit.expired():  # inside a call, which then ended as if by its own cancel
                raise TimeoutError
        except Broken as broken:
            self.story.broken = str(broken)
        except TimeoutError:
            self.story.broken = f"no end within {self._patience_s:g} s"
        finally:
            self.done = True
            self.asked.set()
            if self._cancelling is not None:
                self._cancelling.cancel()
                await asyncio.gather(self._cancelling, return_exceptions=True)
        return self.story

    async def _run(self) -> None:
        if self.order.manner is Manner.TWICE and self.order.variant:
            await asyncio.sleep(self.order.delay_s)
        if self.order.manner is Manner.CANCEL and self.order.events < 0:
            await self._cancel()
        router = self.order.router
        while True:
            await self._converse(router)
            if self.story.completed is not None or self.story.left:
                break
            if not self._again():
                break
            if self.story.events and not self._attaches:
                break
            last = self.story.connections[-1]
            await asyncio.sleep(last.retry_after_s or 0.0 if last.refused else AGAIN_S)
            router = 1 - router
        if self._cancelling is not None:
            await self._cancelling

    def _again(self) -> bool:
        """Whether the last connection is to be followed by another."""
        last = self.story.connections[-1]
        status = last.status
        if status is grpc.StatusCode.NOT_FOUND and self._forgetful:
            self._unknown += 1
            return self._unknown * AGAIN_S < TOLD_AGAIN_S
        came_back = self.order.manner is Manner.RETURN and status is grpc.StatusCode.CANCELLED
        return came_back or last.refused or status is grpc.StatusCode.UNAVAILABLE

    async def _converse(self, router: int) -> None:
        """One connection, from its first event to its status."""
        story = self.story
        again = bool(story.events) and self._attaches and not (self.order.variant and self.order.manner is Manner.RETURN)
        wanted = max(story.events) + 1 if again else 0
        async with self._channel(router) as channel:
            stub: Any = pb_grpc.InferenceServiceStub(channel)
            if again:
                message = pb.AttachRequest(request_id=story.request_id, next_sequence_no=wanted)
                call = stub.Attach(message, metadata=self._metadata)
            else:
                call = stub.Generate(self.request, metadata=self._metadata)
            terminal, status, told = False, grpc.StatusCode.OK, {}
            try:
                # Written, as far as this side can tell.
                self.asked.set()
                await self._act(call)
                async for event in call:
                    if terminal:
                        raise Broken("an event after the terminal one")
                    story.take(event, wanted)
                    wanted += 1
                    terminal = event.WhichOneof("event") == "completed"
                    await self._act(call)
                    await self._rest(terminal)
            except grpc.aio.AioRpcError as failure:
                details = details_from(failure)
                status = failure.code()
                told = {"said": details.message, "reason": details.reason, "retry_after_s": details.retry_after_s}
            except asyncio.CancelledError:
                if not call.cancelled():  # the round was cancelled, not the call
                    raise
                # Its own doing, maybe with the terminal event in hand: the status is not the router's word.
                terminal, status = False, grpc.StatusCode.CANCELLED
            finally:
                call.cancel()
        story.connections.append(Connection("Attach" if again else "Generate", router, terminal, status, **told))

    def _channel(self, router: int) -> grpc.aio.Channel:
        narrow = NARROW if self.order.manner in (Manner.SLOW, Manner.CRAWL) else ()
        return channel_to(self._routers[router], *narrow)

    async def _rest(self, terminal: bool) -> None:
        """A slow reader's pause after an event."""
        if terminal:
            return
        if self.order.manner is Manner.SLOW:
            await asyncio.sleep(SLOW_S)
        elif self.order.manner is Manner.CRAWL and len(self.story.events) <= CRAWL_EVENTS:
            await asyncio.sleep(CRAWL_S)

    async def _act(self, call: Any) -> None:
        """Leave or cancel, when it is time; once."""
        if self._acted or len(self.story.events) < self.order.events:
            return
        if self.order.manner is Manner.CANCEL:
            self._acted = True
            self._cancelling = asyncio.create_task(self._cancel(), name=f"cancel {self.story.request_id}")
        elif self.order.manner in (Manner.LEAVE, Manner.RETURN):
            self._acted = True
            if self.order.events == 0:
                await asyncio.sleep(self.order.delay_s)
            self.story.left = self.order.manner is Manner.LEAVE
            call.cancel()

    async def _cancel(self) -> None:
        self._acted = True
        story, wait = self.story, self.order.variant
        story.cancels.append(await cancelled(self._routers, 1 - self.order.router, story.request_id, wait=wait))

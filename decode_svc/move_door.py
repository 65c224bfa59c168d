"""The gRPC edge of sequences that move: what their routers ask for here, and what the members ask that they move to."""

import asyncio
from collections.abc import Callable
from typing import Any

from decode_svc import pushing
from decode_svc.messages import Command, DrainPush, PauseSeat, PushDrained, PushSeat, SeatPushed
from decode_svc.streams import SeatStream
from kv_transfer.grant_writer import TRANSFER_FAILED
from kv_transfer.offer import BadGrant, HandoverError, LayoutMismatch, grant_from_proto
from kv_transfer.plan import SourceMemory, plan
from kv_transfer.sending import SendingEnd
from member.drain_door import DrainDoor
from member.inbox import Inbox
from rpc.status import abort, unimplemented
from tandem.pools.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc


class MoveDoor(prefill_pb2_grpc.PrefillServiceServicer):
    """A decode member as a writer. It serves prefill's port for the grants that it writes into: Drain, and no prompts."""

    def __init__(self, inbox: Inbox[Command], deliver: Callable[[SeatPushed], None]) -> None:
        """`deliver`: takes what is to be told on a seat's stream."""
        self._inbox = inbox
        self._deliver = deliver
        self._drains = DrainDoor(lambda grant_id, asker: inbox.put_nowait(DrainPush(grant_id, asker)))
        self._starting = asyncio.Lock()

    def open(self, member: str, incarnation: str, source: SourceMemory, sending: SendingEnd) -> None:
        """Calls may come. `sending`: not started, so that a member whose sequences stay has no sending agent."""
        self._member = member
        self._source = source
        self._sending = sending
        self._drains.open(member, incarnation)

    def pause(self, stream: SeatStream) -> None:
        """PauseSeat."""
        self._inbox.put_always(PauseSeat(stream.number))

    async def push(self, stream: SeatStream, message: decode_pb2.PushSeat) -> None:
        """PushSeat. What is wrong with the grant, or with the sending agent, is answered on the stream."""
        try:
            handover = plan(grant_from_proto(message.grant, self._source.layout), self._source)
            async with self._starting:
                if not self._sending.started:
                    await asyncio.to_thread(self._sending.start)
        except LayoutMismatch as error:
            self._refuse(stream, pushing.LAYOUT_MISMATCH, error)
        except BadGrant as error:
            self._refuse(stream, pushing.BAD_GRANT, error)
        except HandoverError as error:
            self._refuse(stream, TRANSFER_FAILED, error)
        else:
            self._inbox.put_always(PushSeat(stream.number, handover))

    def drained(self, answer: PushDrained) -> None:
        """The engine's answer to a Drain; called on the event loop."""
        self._drains.answered(answer.asker, answer.committed)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:  # noqa: N802
        """No."""
        text = f"{self._member} is a decode member: it writes what its own sequences have, and computes no prompts for others"
        await abort(context, unimplemented(text, "NOT_A_PREFILL_MEMBER"))

    async def Drain(self, request: prefill_pb2.DrainRequest, context: Any) -> prefill_pb2.DrainResponse:  # noqa: N802
        """Answers when no write for the grant is in flight and none will start."""
        return await self._drains.drain(request, context)

    def _refuse(self, stream: SeatStream, cause: str, error: HandoverError) -> None:
        self._deliver(SeatPushed(stream.number, cause, str(error), 0, 0.0))

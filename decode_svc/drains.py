"""Asks prefill members to stop writing. One try is one task with a time-out; the scheduler decides what follows it."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import grpc

from decode_svc.messages import AskDrain, DrainAnswer, DrainAnswered
from rpc import clocks
from tandem.pools.v1 import prefill_pb2 as pb
from tandem.pools.v1 import prefill_pb2_grpc as pb_grpc

#: Prefill members whose connection is kept.
CHANNELS_MAX = 64

_LOG = logging.getLogger("decode.drains")

_ANSWERS = {
    pb.DRAIN_STATE_DRAINED: DrainAnswer.STOPPED,
    pb.DRAIN_STATE_COMMITTED: DrainAnswer.STOPPED,
    pb.DRAIN_STATE_WRONG_INCARNATION: DrainAnswer.OTHER_INCARNATION,
}


class Drains:
    """`answer` gets the end of each try, on the event loop; `answered_after` the seconds of those that were answered.

    Tries are as many as grants are open, which is bounded.
    """

    def __init__(
        self,
        dial: Callable[[str], grpc.aio.Channel],
        answer: Callable[[DrainAnswered], None],
        answered_after: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        self._dial = dial
        self._answer = answer
        self._answered_after = answered_after
        self._timeout_s = timeout_s
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, order: AskDrain) -> None:
        """Begin one try; never raises, never waits."""
        task = asyncio.create_task(self._try(order), name=f"drain {order.grant_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def open_tries(self) -> int:
        """Tries that have not ended."""
        return len(self._tasks)

    async def close(self) -> None:
        """Give up what has not ended and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def _try(self, order: AskDrain) -> None:
        if order.delay_s > 0:
            await asyncio.sleep(order.delay_s)
        answer = DrainAnswer.SILENT
        try:
            stub = pb_grpc.PrefillServiceStub(await self._channel(order.writer.address))
            request = pb.DrainRequest(grant_id=bytes.fromhex(order.grant_id), incarnation=order.writer.incarnation)
            asked_at = clocks.monotonic()
            response = await stub.Drain(request, timeout=self._timeout_s)
            self._answered_after(clocks.monotonic() - asked_at)
            answer = _ANSWERS.get(response.state, DrainAnswer.SILENT)
        except grpc.aio.AioRpcError as error:
            _LOG.warning(
                "prefill member %s did not answer Drain of grant %s: %s",
                order.writer.member,
                order.grant_id,
                error.code().name,
                extra={"request_id": order.key.request_id, "attempt": order.key.attempt},
            )
        self._answer(DrainAnswered(order.grant_id, answer))

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        self._channels.move_to_end(address)
        if len(self._channels) > CHANNELS_MAX:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close(self._timeout_s)
        return channel

"""A sequence on its way from a draining decode member to another one: the seat that it leaves, until the other has it.

The seat stands still. Its member writes the KV into the other member's grant, as a prefill member would. When that fails, or
when the seat ends before, nothing is lost: the sequence is computed again from the tokens that were told.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from router.member_link import Member
from router.pool_messages import SeatEnd
from router.seat import Paused, Pushed, Seat, SeatLost, SeatRefused

_log = logging.getLogger(__name__)

_LOST = Pushed(ok=False, cause="source_lost", sent_bytes=0, handover_s=0.0)
#: What the member is told when the sequence goes on elsewhere, see CancelSeat in decode.proto.
MOVED = "moved"


class Source:
    """The seat to leave. `stack` holds its stream open; `gone` is called when it can not be moved from any more.

    Exactly one `close`.
    """

    def __init__(self, seat: Seat, stack: AsyncExitStack, paused: Paused, gone: Callable[[], None]) -> None:
        self.member: Member = seat.member
        self.usable = paused.pushable
        self._seat = seat
        self._stack = stack
        self._gone = gone
        self._pushed: asyncio.Future[Pushed] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch(), name=f"leaving {seat.member.name}")

    async def push(self, grant: object) -> Pushed:
        """Has the KV written into another member's grant. Once; a seat that is gone answers at once."""
        self.usable = False
        self._seat.push(grant)
        return await self._pushed

    async def close(self, reason: str) -> None:
        """The seat ends; its member is told why. Returns when nothing of it is left, within the grace of a cancel."""
        self._seat.cancel(reason)
        await asyncio.wait([self._task])
        await self._stack.aclose()

    async def _watch(self) -> None:
        try:
            while True:
                event = await self._seat.read()
                if isinstance(event, Pushed) and not self._pushed.done():
                    self._pushed.set_result(event)
                elif isinstance(event, SeatEnd):
                    break
        except (SeatLost, SeatRefused) as lost:
            _log.info("the seat to leave at %s is gone: %s", self.member.name, lost)
        if not self._pushed.done():
            self._pushed.set_result(_LOST)
        self.usable = False
        self._gone()

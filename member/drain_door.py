"""Drain, as every member serves it that writes into the grants of others."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from member.inbox import InboxFull
from rpc.status import abort, unavailable
from tandem.pools.v1 import prefill_pb2 as pb

RETRY_AFTER_S = 0.2
#: Longest wait for the writes of one grant to end; whoever asked may ask again.
DRAIN_S = 15.0


class DrainDoor:
    """`put` gives (grant id, number of the asker) to the engine thread; it may raise InboxFull. `answered` gets the answer."""

    def __init__(self, put: Callable[[str, int], None]) -> None:
        self._put = put
        self._askers = itertools.count()
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._member = self._incarnation = ""

    def open(self, member: str, incarnation: str) -> None:
        """Calls may come; any other incarnation that is meant is told so."""
        self._member, self._incarnation = member, incarnation

    def answered(self, asker: int, committed: bool) -> None:
        """Nothing is in flight and nothing will start; `committed`: every write had been done. Called on the event loop."""
        answer = self._answers.get(asker)
        if answer is not None and not answer.done():
            answer.set_result(committed)

    async def drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Answers when no write for the grant is in flight and none will start."""
        if request.incarnation != self._incarnation:
            return pb.DrainResponse(state=pb.DRAIN_STATE_WRONG_INCARNATION)
        asker = next(self._askers)
        answer = self._answers[asker] = asyncio.get_running_loop().create_future()
        try:
            self._put(bytes(request.grant_id).hex(), asker)
            async with asyncio.timeout(DRAIN_S):
                committed = await answer
        except TimeoutError:
            await abort(context, unavailable(f"{self._member} still writes into the grant", "STILL_WRITING"))
        except InboxFull as error:
            await abort(context, unavailable(f"{self._member}: {error}", "INBOX_FULL", retry_after_s=RETRY_AFTER_S))
        finally:
            del self._answers[asker]
        return pb.DrainResponse(state=pb.DRAIN_STATE_COMMITTED if committed else pb.DRAIN_STATE_DRAINED)

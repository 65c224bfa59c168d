"""The messages of one Decode call, with a look at the next one before it is taken."""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from tandem.pools.v1 import decode_pb2 as pb


class Requests:
    """An async iterator, for one reader at a time."""

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = aiter(messages)
        self._next: asyncio.Future[Any] | None = None

    def coming(self) -> "asyncio.Future[Any]":
        """Done when the next message, or the end, is here. It stays to be taken."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._messages, None))
        return self._next

    def next_cancels(self) -> bool:
        """Whether the next message is here and ends the request, not only one of its outputs."""
        found = self._next
        if found is None or not found.done() or found.cancelled() or found.exception() is not None:
            return False
        message = found.result()
        ends = message is not None and message.WhichOneof("message") == "cancel"
        return ends and not message.cancel.HasField("choice")

    def close(self) -> None:
        """Nobody waits for a message any more."""
        waiting, self._next = self._next, None
        if waiting is None or waiting.cancel() or waiting.cancelled():
            return
        waiting.exception()  # the call has ended; whoever serves it knows

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> pb.DecodeRequest:
        waiting = self._next
        self._next = None
        message: pb.DecodeRequest | None = await (anext(self._messages, None) if waiting is None else waiting)
        if message is None:
            raise StopAsyncIteration
        return message

"""Listening to what the simulated store publishes."""

import asyncio
from typing import Any

from redis.exceptions import ConnectionError


class PubSub:
    """A listening connection of a client of the simulated store."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._names: set[str] = set()
        self._texts: list[str] = []
        self._broken = False
        self._waiting: asyncio.Future[None] | None = None

    async def subscribe(self, name: str) -> None:
        """Hears `name` from now on."""
        await self._client.execute("TIME")
        self._names.add(name)

    async def get_message(self, ignore_subscribe_messages: bool, timeout: float) -> dict[str, str] | None:
        """The next published text, None when there was none in time. Raises ConnectionError."""
        if not self._texts and not self._broken:
            self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiting], timeout=timeout)
        if self._broken:
            raise ConnectionError("connection lost")
        return {"type": "message", "data": self._texts.pop(0)} if self._texts else None

    def heard(self, name: str, text: str) -> None:
        """Something was published."""
        if name in self._names:
            self._texts.append(text)
            self._wake()

    def broke(self) -> None:
        """The connection is lost."""
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

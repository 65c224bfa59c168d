"""Waiting for something that another process does, with a bound."""

import asyncio
import time
from collections.abc import Awaitable, Callable

LOOK_AGAIN_S = 0.02


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float, what: str) -> object:
    """The first truthy answer of `condition`; fails with the last answer after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = await condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(LOOK_AGAIN_S)

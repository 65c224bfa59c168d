"""What the routes of the HTTP door are built on."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.routing import BaseRoute

from router.config import RouterSettings
from router.servicer import InferenceServicer
from rpc.application import Frame


class OpenAnswers:
    """Answers to clients' requests that are not finished."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        """An answer, from its request to its last byte."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def none_left(self) -> None:
        """Returns when none is open."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class Host:
    """The router as its HTTP routes see it. `serving` raises StatusError (LOADING) before the router has started."""

    frame: Frame
    settings: RouterSettings
    serving: Callable[[], InferenceServicer]
    answers: OpenAnswers = field(default_factory=OpenAnswers)


#: A part of the door: makes the routes that it answers.
Part = Callable[[Host], Sequence[BaseRoute]]

"""Sends a schedule through a door: closed loop, or open loop that waits for no answer."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem_cli.load.door import Door, RequestFailed
from tandem_cli.load.measured import Measured, Seen
from tandem_cli.load.workload import Level, Loop, Planned, Workload, beside_schedule, schedule

Tell = Callable[[Seen], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What to send: a level of a workload, and which of its interleaved runs this is."""

    workload: Workload
    level: Level
    seed: int
    vocabulary_size: int


def _nobody(seen: Seen) -> None:
    pass


async def drive(door: Door, run: Run, ended: Tell = _nobody) -> Measured:
    """Run it and note what every client sees. A failed request is a figure of the run, not its end.

    ended: told of each request when it is over.
    """
    planned = schedule(run.workload, run.level, run.seed, run.vocabulary_size)
    beside = beside_schedule(run.workload, run.seed, run.vocabulary_size)
    began = time.perf_counter()
    aside: list[Seen] = []
    along = asyncio.create_task(_open(door, beside, aside.append, beside=True))
    seen: list[Seen] = []

    def note(one: Seen) -> None:
        seen.append(one)
        ended(one)

    try:
        if run.level.loop is Loop.CLOSED:
            await _closed(door, planned, note, round(run.level.value))
        else:
            await _open(door, planned, note)
        seconds = time.perf_counter() - began
    finally:
        along.cancel()
        await asyncio.gather(along, return_exceptions=True)
    # Requests beside that were cut off by the end are none.
    return Measured(seconds, (*seen, *(one for one in aside if one.ended_at)))


async def _closed(door: Door, planned: Sequence[Planned], note: Tell, clients: int) -> None:
    left = list(reversed(planned))

    async def client() -> None:
        while left:
            note(await _one(door, left.pop()))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def _open(door: Door, planned: Iterable[Planned], note: Tell, beside: bool = False) -> None:
    began = time.perf_counter()

    async def one(request: Planned) -> None:
        note(await _one(door, request, beside))

    async with asyncio.TaskGroup() as group:
        for request in planned:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            group.create_task(one(request))


async def _one(door: Door, planned: Planned, beside: bool = False) -> Seen:
    seen = Seen(time.perf_counter(), planned.output_tokens, beside)
    try:
        await door.ask(planned, seen)
    except RequestFailed as error:
        seen.failure, seen.reason = str(error), error.reason
    except Exception as error:  # noqa: BLE001  (a failed request is a figure of the run, not its end)
        seen.failure, seen.reason = f"{type(error).__name__}: {error}", type(error).__name__
    seen.close(time.perf_counter())
    return seen

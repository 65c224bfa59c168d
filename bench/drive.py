"""Sends a schedule through a door: closed loop, or open loop that waits for no answer."""

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import disturbance
from bench.doors import Door
from bench.measured import Measured, Seen
from bench.workload import Level, Loop, Planned, Workload, beside_schedule, schedule


@dataclass(frozen=True, slots=True)
class Run:
    """What to send: a level of a workload, and which of its interleaved runs this is."""

    workload: Workload
    level: Level
    seed: int
    vocabulary_size: int


async def drive(door: Door, run: Run, processes: Sequence[int]) -> Measured:
    """Run it and note what every client sees. A failed request is a figure of the run, not its end.

    processes: the roots of what is driven; what any other one uses, a side that should be idle too, is a disturbance.
    """
    planned = schedule(run.workload, run.level, run.seed, run.vocabulary_size)
    beside = beside_schedule(run.workload, run.seed, run.vocabulary_size)
    before, began = disturbance.read_cpu_times(), time.perf_counter()
    aside: list[Seen] = []
    along = asyncio.create_task(_open(door, beside, aside, beside=True))
    seen: list[Seen] = []
    try:
        if run.level.loop is Loop.CLOSED:
            await _closed(door, planned, seen, round(run.level.value))
        else:
            await _open(door, planned, seen)
        seconds = time.perf_counter() - began
    finally:
        along.cancel()
        await asyncio.gather(along, return_exceptions=True)
    other = disturbance.between(before, disturbance.read_cpu_times(), processes, alone=[os.getpid()])
    # Requests beside that were cut off by the end are none.
    return Measured(seconds, (*seen, *(one for one in aside if one.ended_at)), other)


async def _closed(door: Door, planned: Sequence[Planned], seen: list[Seen], clients: int) -> None:
    left = list(reversed(planned))

    async def client() -> None:
        while left:
            seen.append(await _one(door, left.pop()))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def _open(door: Door, planned: Iterable[Planned], seen: list[Seen], beside: bool = False) -> None:
    began = time.perf_counter()

    async def one(request: Planned) -> None:
        seen.append(await _one(door, request, beside))

    async with asyncio.TaskGroup() as group:
        for request in planned:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            group.create_task(one(request))


async def _one(door: Door, planned: Planned, beside: bool = False) -> Seen:
    seen = Seen(time.perf_counter(), planned.output_tokens, beside)
    try:
        await door.ask(planned, seen)
    except Exception as error:  # noqa: BLE001  (a failed request is a figure of the run, not its end)
        seen.failure = f"{type(error).__name__}: {error}"
    seen.close(time.perf_counter())
    return seen

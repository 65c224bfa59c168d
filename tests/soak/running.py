"""Runs a soak: waves of requests and faults against one cell, each judged, and what every process takes measured at rest."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from redis import RedisError

from models import Tokenizer
from tests.chaos.cell import FLAGS, STORE, ChaosCell, chaos_cell
from tests.chaos.inspection import Watch, at_rest
from tests.chaos.playing import Pace, play
from tests.chaos.undisturbed import Undisturbed
from tests.model_files import default_model
from tests.soak.adapter import write_adapter
from tests.soak.measuring import SharedMemory, log_bytes, of_all, of_process, types_of
from tests.soak.refused import refused
from tests.soak.story import Asked, Story
from tests.soak.verdict import Sample
from tests.soak.waves import ADAPTER, EVERY_SHAPE, LOST_AFTER_S, Wave, wave_of

#: Requests at the same time, bad ones not counted; long patience: a soak may run beside other work.
PACE = Pace(at_once=5, patience_s=300.0)
#: For the same reason nobody is taken for lost soon, and no clock but that of a request with little time runs out.
ROUTER_FLAGS = {
    "stale-after-s": 4,
    "lost-after-s": LOST_AFTER_S,
    "seat-timeout-s": 5,
    "cancel-grace-s": 5,
    "failover-wait-s": PACE.patience_s,
    "queue-clock-s": PACE.patience_s,
    "first-token-clock-s": PACE.patience_s,
    "inter-token-clock-s": PACE.patience_s,
}
#: Between two looks at what processes take while they work.
LOOK_EVERY_S = 5.0
#: For a grammar: its compiler is a process of its own, and starts while everything else runs.
COMPILE_S = 30.0


@dataclass(frozen=True, slots=True)
class Length:
    """How long waves are begun, in seconds, of how many requests, and how many waves there are all the same on a slow machine."""

    seconds: float
    requests: int
    waves_min: int = 2


@contextmanager
def soak_cell(folder: Path) -> Iterator[ChaosCell]:
    """A cell of chaos, with an adapter, that is not started yet."""
    adapter = write_adapter(folder / ADAPTER, default_model())
    router = {**FLAGS["router"], **ROUTER_FLAGS}
    prefill = {**FLAGS["prefill"], "adapters": f"{ADAPTER}={adapter}"}
    decode = {**FLAGS["decode"], "adapters": f"{ADAPTER}={adapter}", "grammar-compile-s": COMPILE_S}
    with chaos_cell(folder, {"router": router, "prefill": prefill, "decode": decode}, cuts=False) as cell:
        yield cell


class Soak:
    """One soak on one cell. What is told goes to `out`, a line a wave; every sample as a line of JSON to `journal`."""

    def __init__(self, cell: ChaosCell, tokenizer: Tokenizer, seed: str, out: TextIO, journal: TextIO) -> None:
        self.story = Story()
        self._cell = cell
        self._tokenizer = tokenizer
        self._seed = seed
        self._out = out
        self._journal = journal
        self._undisturbed = Undisturbed()
        self._watch = Watch()
        self._shared = SharedMemory()
        self._began = 0.0
        self._since_store = 0
        self._store_starts = 0

    async def run(self, length: Length) -> Story:
        """Waves until the time is over; the last one is played to its end."""
        await self._cell.whole()
        await self._undisturbed.learn(EVERY_SHAPE, self._cell.routers[0], self._tokenizer)
        self._store_starts, self._since_store = self._cell[STORE].starts, len(EVERY_SHAPE)
        self._began = time.monotonic()
        looking = asyncio.create_task(self._look_on(), name="look on")
        try:
            await self._rest(0)
            while self._now() < length.seconds or self.story.waves < length.waves_min:
                await self._wave(wave_of(self._seed, self.story.waves, length.requests))
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        self.story.seconds = self._now()
        self.story.eldest = tuple(f"{name}.{one.starts}" for name, one in self._cell.processes.items() if one.starts == 1)
        return self.story

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _wave(self, wave: Wave) -> None:
        """What goes wrong in it is kept, and the soak goes on: the next wave begins with a cell that is whole."""
        story, began, wrong = self.story, self._now(), len(self.story.wrong)
        story.waves += 1
        story.faults.update(fault.kind.value for fault in wave.plan.faults)
        rng = random.Random(f"bad {self._seed} {wave.number}")
        outcomes: Counter[str] = Counter()
        try:
            await self._cell.whole()
            async with asyncio.TaskGroup() as tasks:
                playing = tasks.create_task(play(self._cell, self._undisturbed, wave.plan, self._tokenizer, PACE))
                bad = [tasks.create_task(refused(self._cell.routers, rng)) for _ in range(wave.bad)]
            judged = playing.result()
            answers = [task.result() for task in bad]
            outcomes.update([one.outcome for one in judged] + ["refused" for answer in answers if not answer])
            story.wrong += [f"wave {wave.number}: {one.wrong}" for one in judged if one.wrong]
            story.wrong += [f"wave {wave.number}: {answer}" for answer in answers if answer]
            story.tokens += sum(one.tokens for one in judged)
            self._count(len(judged) + len(answers), len(judged))
            await at_rest(self._cell)
            await self._rest(wave.number)
        except* (AssertionError, OSError, RedisError) as group:
            story.wrong += [f"wave {wave.number} ({wave.plan}): {one}" for one in _leaves(group)]
        story.wrong += [f"wave {wave.number}: {line}" for line in self._watch.log_faults(self._cell)]
        story.outcomes.update(outcomes)
        self._tell(wave, began, outcomes, story.wrong[wrong:])

    def _count(self, asked: int, recorded: int) -> None:
        self.story.requests += asked
        if self._cell[STORE].starts != self._store_starts:
            self._store_starts, self._since_store = self._cell[STORE].starts, 0
        self._since_store += recorded

    async def _rest(self, number: int) -> None:
        """Measure everything; the cell is at rest."""
        at_s, starts = self._now(), sum(one.starts for one in self._cell.processes.values())
        for name, figures in (await of_all(self._cell)).items():
            self.story.samples.setdefault(name, []).append(Sample(at_s, starts, figures))
            types = types_of(self._cell[name.rpartition(".")[0]])
            self._write({"at_s": at_s, "wave": number, "process": name, "starts": starts, **figures, "types": types})
        left = self._shared.look(self._cell)
        self.story.wrong += [f"wave {number}: {path} is left, and no process has it" for path in left]
        self.story.asked.append(Asked(at_s, self._since_store, log_bytes(self._cell)))

    async def _look_on(self) -> None:
        """Sizes while they work, for the peaks."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._shared.look(self._cell)
            for process in self._cell.processes.values():
                if not process.running or process.popen is None:
                    continue
                try:
                    figures = await asyncio.to_thread(of_process, process.popen.pid)
                except (OSError, KeyError):  # it has just ended
                    continue
                name = f"{process.name}.{process.starts}"
                self.story.peaks[name] = max(self.story.peaks.get(name, 0.0), figures["rss"])
                self._write({"at_s": self._now(), "working": True, "process": name, **figures})

    def _write(self, line: dict[str, object]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _tell(self, wave: Wave, began: float, outcomes: Counter[str], wrong: list[str]) -> None:
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"[{began:6.0f} s] wave {wave.number}, {self._now() - began:.0f} s: {wave.plan}: {words}", file=self._out)
        for sentence in wrong:
            print(f"  WRONG: {sentence}", file=self._out)
        self._out.flush()


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one

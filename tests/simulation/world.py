"""One world from one seed: build the cell, let requests and faults happen, wait for rest, tell what was wrong."""

import asyncio
import gc
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import AioRpcError

from rpc import clocks
from tandem.v1 import inference_pb2 as pb
from tests.simulation.cell import Cell, Making
from tests.simulation.checks import ENDED, Checks
from tests.simulation.client_plans import OVERALL_S
from tests.simulation.clients import Clients
from tests.simulation.faults import Injector
from tests.simulation.loop import BEGIN_S, VirtualLoop
from tests.simulation.scenario import Scenario, draw
from tests.simulation.store_watch import RecordWatch

#: Lines of the history that are kept of each request, and of what happened to the cell.
HISTORY_LINES = 60
#: Virtual seconds within which every client has its end, after the last request was sent.
ALL_ENDED_S = OVERALL_S + 90.0
#: Virtual seconds from then on within which nothing is held any more.
AT_REST_S = 150.0
LOOK_EVERY_S = 0.25


@dataclass
class Result:
    """What became of a world. `faults` are sentences, empty when all was well."""

    seed: int
    faults: list[str] = field(default_factory=list)
    history: dict[str, list[str]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    outcomes: list[str] = field(default_factory=list)

    def report(self) -> str:
        """For people: the faults, how to replay, and what happened to the requests they name."""
        lines = [f"seed {self.seed}: {len(self.faults)} faults", *(f"  {fault}" for fault in self.faults)]
        lines.append(f"  replay: PYTHONHASHSEED=0 python -m tests.simulation --seed {self.seed}")
        named = [name for name in self.history if name and any(name in fault for fault in self.faults)]
        for name in ["", *named[:2]]:
            lines += [f"  -- {name or 'the cell'}", *(f"  {line}" for line in self.history.get(name, []))]
        return "\n".join(lines)


class _Failures(logging.Handler):
    """Exceptions that reached a log: never right."""

    def __init__(self, found: Any) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found(f"{record.getMessage()}: {record.exc_info[1]!r}")


class World:
    """See the module; `run` once."""

    def __init__(self, scenario: Scenario, making: Making | None = None) -> None:
        self._scenario = scenario
        self._result = Result(scenario.seed)
        self._history: dict[str, deque[str]] = {}
        self._loop = VirtualLoop()
        self._checks = Checks(scenario, self._note)
        rng = random.Random(f"world {scenario.seed}")
        making = making or Making()
        self._cell = Cell(self._loop, rng, scenario.shape, scenario.weather, making, self._checks.after_turn)
        self._checks.cell = self._cell
        self._cell.store.watch = RecordWatch(self._checks.found).look
        self._cell.fabric.allowed = self._checks.may_write
        shape, forgets = scenario.shape, scenario.forgets
        self._clients = Clients(self._cell.network, scenario.clients, shape.routers, self._note, forgets)
        self._injector = Injector(self._cell, self._clients, self._note)

    def run(self) -> Result:
        """From the first process to the rest of the last."""
        random.seed(f"code {self._scenario.seed}")
        handler = _Failures(self._checks.found)
        root = logging.getLogger()
        level, before = root.level, list(root.handlers)
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        self._loop.set_exception_handler(self._unhandled)
        with clocks.replaced_by(self._cell.making.clocks(self._loop)):
            try:
                self._loop.run_until_complete(self._until_broken())
            except Exception as broken:  # noqa: BLE001  (a world that breaks is a fault like any other)
                self._checks.look()
                self._checks.found(f"the world broke: {broken!r}")
            finally:
                self._result.steps, self._result.seconds = self._loop.steps, self._loop.time() - BEGIN_S
                root.handlers[:] = []
                logging.disable(logging.CRITICAL)
                hosts = [*self._cell.hosts.values(), *self._cell.buried]
                self._loop.dispose([*hosts, self._clients, self._cell.store.process])
                logging.disable(logging.NOTSET)
                root.handlers[:] = before
                root.setLevel(level)
        self._result.faults = [*self._checks.faults, *self._clients.faults][:10]
        self._result.history = {name: list(lines) for name, lines in self._history.items()}
        self._result.outcomes = [self._outcome(seen) for seen in self._clients.seen.values()]
        return self._result

    @staticmethod
    def _outcome(seen: Any) -> str:
        if seen.completed is not None:
            state, reason = pb.RequestState.Name(seen.completed.state), pb.FinishReason.Name(seen.completed.finish_reason)
            return f"{state[14:]} {reason[14:]} {seen.completed.cause}"
        return "LEFT" if seen.left else f"{seen.status.name if seen.status else None} {seen.reason}"

    def _note(self, name: str, what: str) -> None:
        lines = self._history.setdefault(name, deque(maxlen=HISTORY_LINES))
        lines.append(f"{self._loop.time() - BEGIN_S:9.4f}  {what}")

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self._checks.found(f"{context.get('message')}: {context.get('exception')!r}")

    async def _until_broken(self) -> None:
        """The whole life, or until a process has crashed: nothing that comes after it tells anything."""
        living, looking = self._loop.create_task(self._live()), self._loop.create_task(self._look())
        crash = self._loop.create_task(self._cell.broken.wait())
        done, _ = await asyncio.wait({living, looking, crash}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        looking.cancel()
        self._checks.look()

    async def _live(self) -> None:
        await self._cell.start_all()
        self._clients.begin()
        self._injector.begin(self._scenario.faults)
        last = max(plan.at_s for plan in self._scenario.clients)
        await self._clients.done(last + ALL_ENDED_S)
        await self._injector.healed()
        until = self._loop.time() + AT_REST_S
        await self._rest(until)
        await self._records()
        while self._unfinished() and self._loop.time() < until:
            # A write that was long under way has brought a record that is to be ended yet.
            await asyncio.sleep(5.0)
            await self._rest(until)
            await self._records()
        self._checks.requests(self._clients)

    def _unfinished(self) -> bool:
        records = [seen.record for seen in self._clients.seen.values() if seen.record is not None]
        return any(record.state not in ENDED for record in records)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._checks.look()

    async def _rest(self, until: float) -> None:
        """Waits until nothing is held; says what is when the time is over."""
        pause_s = 0.1
        while True:
            held = await self._checks.holdings()
            if not held:
                return
            if self._loop.time() >= until:
                for one in held:
                    self._checks.found(f"not at rest: {one}")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(5.0, 2 * pause_s)

    async def _records(self) -> None:
        """What the store says of each request."""

        async def ask() -> None:
            for seen in self._clients.seen.values():
                try:
                    answer = await self._clients.stub(seen.plan.router).Get(pb.GetRequest(request_id=seen.plan.request_id))
                except AioRpcError as error:
                    self._note(seen.plan.request_id, f"no record: {error.code().name}")
                else:
                    seen.record = answer.record

        await self._loop.create_task(ask(), context=self._clients.context.copy())


def run(seed: int, making: Making | None = None) -> Result:
    """The world of a seed."""
    gc.disable()
    try:
        return World(draw(seed), making).run()
    finally:
        gc.enable()
        if seed % 8 == 0:
            gc.collect()

"""Faults at their times, and the end of each."""

import asyncio
from collections.abc import Callable

from tests.simulation.cell import STOP_S, Cell
from tests.simulation.clients import Clients
from tests.simulation.scenario import BUSY_S, Fault, FaultKind
from tests.simulation.store_watch import Late, Trap

#: Virtual seconds between two looks at a process that starts.
LOOK_S = 0.1


class Injector:
    """Carries faults out. After `healed` nothing is wrong any more and every process runs."""

    def __init__(self, cell: Cell, clients: Clients, note: Callable[[str, str], None]) -> None:
        self._cell = cell
        self._clients = clients
        self._note = note
        self._live: list[asyncio.Task[None]] = []

    def begin(self, faults: tuple[Fault, ...]) -> None:
        """Every fault waits for its moment."""
        loop = self._cell.loop
        self._live = [loop.create_task(self._one(fault), context=loop.outside.copy()) for fault in faults]

    async def healed(self) -> None:
        """Waits for the end of the last one."""
        if self._live:
            done, _ = await asyncio.wait(self._live)
            for task in done:
                task.result()

    async def _one(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        self._note("", f"{fault.kind.value} {' '.join(fault.names)} for {fault.lasts_s:.2f} s")
        await getattr(self, f"_{fault.kind.value}")(fault)
        self._note("", f"{fault.kind.value} {' '.join(fault.names)} is over")

    async def _kill(self, fault: Fault) -> None:
        name = fault.names[0]
        if self._cell.hosts[name].dead:
            return
        self._cell.kill(name)
        await asyncio.sleep(fault.lasts_s)
        await self._start(name)

    async def _start(self, name: str) -> None:
        """The process starts again; one that is killed while it does so is another fault's matter."""
        kind, _, number = name.rpartition("-")
        starting = self._cell.start(kind, int(number))
        host = self._cell.hosts[name]
        while not starting.done() and not host.dead:
            await asyncio.wait([starting], timeout=LOOK_S)

    async def _drain(self, fault: Fault) -> None:
        """SIGTERM, and a new process after it."""
        name = fault.names[0]
        host = self._cell.hosts[name]
        if host.dead or host.halted or host.drains or not host.ready:
            return
        await asyncio.wait([self._cell.drain(name, fault.lasts_s)], timeout=fault.lasts_s + 2 * STOP_S)
        if not host.dead:
            self._cell.kill(name)
            await self._start(name)

    async def _freeze(self, fault: Fault) -> None:
        name = fault.names[0]
        host = self._cell.hosts[name]
        if host.dead or host.halted:
            return
        self._cell.freeze(name)
        await asyncio.sleep(fault.lasts_s)
        if self._cell.hosts[name] is host:
            self._cell.thaw(name)

    async def _cut(self, fault: Fault) -> None:
        one, other = fault.names
        network = self._cell.network
        if network.is_cut(one, other):
            return
        network.cut(one, other)
        await asyncio.sleep(fault.lasts_s)
        network.heal(one, other)

    async def _break(self, fault: Fault) -> None:
        for connection in list(self._cell.network.connections):
            if {connection.client.name, connection.server_name} == set(fault.names):
                connection.lose(None)

    async def _store_away(self, fault: Fault) -> None:
        if not self._cell.store.away:
            self._cell.store.stop()
            await asyncio.sleep(fault.lasts_s)
            self._cell.store.start(empty=fault.kind is FaultKind.STORE_EMPTY)

    _store_empty = _store_away

    async def _clock(self, fault: Fault) -> None:
        name = fault.names[0]
        process = self._cell.store.process if name == "store" else self._cell.hosts[name]
        process.wall_offset_s += fault.amount

    async def _late_write(self, fault: Fault) -> None:
        """The next write of its kind, and with it its router unless it is a stray one."""
        assert fault.write is not None
        sprung = asyncio.Event()
        traps, script = self._cell.store.traps, fault.write.script
        trap = Trap(fault.names[0], script, fault.write.late, fault.amount * fault.lasts_s, sprung.set)
        traps.waiting.append(trap)
        try:
            async with asyncio.timeout(2 * BUSY_S):
                await sprung.wait()
        except TimeoutError:
            traps.waiting.remove(trap)
            return
        self._note("", f"caught: {script} of {fault.names[0]}")
        if fault.write.late is not Late.STRAY:
            await self._freeze(fault)

    async def _slow_wire(self, fault: Fault) -> None:
        self._cell.fabric.set_speed(0)
        await asyncio.sleep(fault.lasts_s)
        self._cell.fabric.set_speed(96)

    async def _writes_fail(self, fault: Fault) -> None:
        for agent in self._cell.fabric.agent_names():
            self._cell.fabric.fail_next(agent)

"""What lies between two simulated processes: messages that travel for a while, in order within a stream and in no order across
streams; connections that break; pairs of processes that do not reach one another for a while.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.loop import Process, VirtualLoop

#: What a receiver lets a sender run ahead, per direction of a stream, in bytes.
WINDOW_BYTES = 16_384
#: What each message takes of it beside itself.
FRAME_BYTES = 5


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network is. Times in seconds, chances from 0 to 1.

    keepalive_s: a peer that answers nothing for so long is given up, and its connection with it.
    """

    delay_s: float = 0.001
    slow_s: float = 0.05
    slow_chance: float = 0.02
    keepalive_s: float = 35.0
    connect_s: float = 2.0
    repeat_chance: float = 0.0
    #: What a cut has caught on its way to the store arrives when it heals, after its sender has asked again or given up.
    stuck_commands: bool = False


class Network:
    """Who reaches whom, and how long it takes."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = weather
        self.servers: dict[str, Any] = {}
        self.connections: dict[Connection, None] = {}
        self._cuts: dict[frozenset[str], float] = {}

    def delay(self) -> float:
        """How long one message travels."""
        rng, weather = self.rng, self.weather
        base = weather.delay_s * (0.5 + rng.random())
        return base + weather.slow_s * rng.random() if rng.random() < weather.slow_chance else base

    def later(self, seconds: float, do: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
        """Calls something that belongs to no process."""
        return self.loop.call_later(seconds, do, *arguments, context=self.loop.outside)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether two processes, by name, do not reach one another now."""
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """From now on nothing gets through between them."""
        self._cuts.setdefault(frozenset((one, other)), self.loop.time())
        self.suspect({one, other})

    def heal(self, one: str, other: str) -> None:
        """They reach one another again; what waited arrives."""
        if self._cuts.pop(frozenset((one, other)), None) is not None:
            for connection in list(self.connections):
                if {connection.client.name, connection.server_name} == {one, other}:
                    connection.release()

    def suspect(self, names: set[str]) -> None:
        """Something may keep these from answering: whoever still waits for a sign of life at the end of keepalive gives up."""
        for connection in list(self.connections):
            if {connection.client.name, connection.server_name} & names:
                self.later(self.weather.keepalive_s * self.rng.uniform(0.9, 1.2), connection.look, connection.silences)

    def died(self, process: Process) -> None:
        """A process was killed: its kernel closes what it had open."""
        for connection in [one for one in self.connections if process in (one.client, one.server_process)]:
            connection.lose(process)


@dataclass(slots=True)
class Item:
    """One thing that travels: a message, the half-close, the end with a status, or a reset."""

    kind: str
    value: Any = None


class Pipe:
    """One direction of a stream. The receiver calls `take`; at most WINDOW_BYTES are sent and not taken."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._network = connection.network
        self._arrives_at = 0.0
        self._held: deque[Item] = deque()
        self._releasing = False
        self._untaken = 0
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()
        self.arrived: deque[Item] = deque()
        #: Sees what arrives first; what it answers True to is not for `take`.
        self.noticed: Callable[[Item], bool] | None = None
        self.closed = False

    async def send(self, data: bytes) -> None:
        """A message; waits while the receiver is too far behind."""
        while self._untaken >= WINDOW_BYTES and not self.closed:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writers.append(future)
            await future
        self.post(Item("message", data))

    def post(self, item: Item) -> None:
        """Puts it on its way, whatever the window says."""
        if self.closed:
            return
        if item.kind == "message":
            self._untaken += len(item.value) + FRAME_BYTES
        now = self._network.loop.time()
        # Timers of the same moment have no order, so no two of a stream have one.
        self._arrives_at = max(self._arrives_at + 1e-6, now + self._network.delay())
        self._network.later(self._arrives_at - now, self._arrive, item)

    def _arrive(self, item: Item) -> None:
        if self.closed:
            return
        if self._held or self._connection.cut:
            self._held.append(item)
        else:
            self._deliver(item)

    def _deliver(self, item: Item) -> None:
        if self.noticed is None or not self.noticed(item):
            self.arrived.append(item)
            self._wake()

    def release(self) -> None:
        """What was held by a cut arrives, one after the other."""
        if self._held and not self.closed and not self._releasing:
            self._releasing = True
            self._network.later(self._network.delay(), self._next_held)

    def _next_held(self) -> None:
        self._releasing = False
        if self._held and not self.closed and not self._connection.cut:
            self._deliver(self._held.popleft())
            self.release()

    async def take(self) -> Item | None:
        """The next item, None when the pipe was closed on this side."""
        while not self.arrived:
            if self.closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.took(self.arrived.popleft())

    def took(self, item: Item) -> Item:
        """Counts an item as taken."""
        if item.kind == "message":
            self._untaken -= len(item.value) + FRAME_BYTES
            while self._writers and self._untaken < WINDOW_BYTES:
                writer = self._writers.popleft()
                if not writer.done():
                    writer.set_result(None)
                    break
        return item

    def close(self, drop: bool = True) -> None:
        """Nothing arrives any more; `drop`: what arrived and was not taken is lost too."""
        self.closed = True
        self._held.clear()
        if drop:
            self.arrived.clear()
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(eq=False)
class Connection:
    """One channel's connection to one run of a server. `streams` are told when it is lost, on either side."""

    network: Network
    client: Process
    server_process: Process
    streams: dict[Any, None] = field(default_factory=dict)
    lost: bool = False
    #: Rises whenever the peer showed a sign of life after a silence.
    silences: int = 0

    def __post_init__(self) -> None:
        self.network.connections[self] = None

    @property
    def server_name(self) -> str:
        """Of the process at the other end."""
        return self.server_process.name

    @property
    def cut(self) -> bool:
        """Whether nothing gets through now."""
        return self.network.is_cut(self.client.name, self.server_process.name)

    def look(self, silences: int) -> None:
        """The end of a keepalive: nobody who hears nothing waits on."""
        silent = self.cut or self.client.halted or self.server_process.halted
        if silent and silences == self.silences:
            self.lose(None)

    def release(self) -> None:
        """It works again."""
        self.silences += 1
        for stream in list(self.streams):
            stream.release()

    def lose(self, culprit: Process | None) -> None:
        """It is gone. `culprit`: the process that died, None when it was given up by both."""
        if self.lost:
            return
        self.lost = True
        self.network.connections.pop(self, None)
        for stream in list(self.streams):
            stream.broken(culprit)
        self.streams.clear()

"""The processes of a simulated cell: each holds the real application and nothing else that is real."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from decode_svc.config import DecodeSettings
from decode_svc.service import DecodeService
from decode_svc.service import Parts as DecodeParts
from member.process import member_of
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts as PrefillParts
from prefill_svc.service import PrefillService
from router.config import RouterSettings
from router.redis_store import RedisStore
from router.service import LoadedModel, Outside, Router
from rpc.application import Application, Frame
from rpc.server_settings import ServerSettings
from telemetry.registry import MetricsRegistry
from telemetry.tracing import Tracing, setup_tracing
from tests.simulation.channel import Channel, Stream
from tests.simulation.drafts import SimulatedDrafts
from tests.simulation.fabric import SimulatedReceiver, SimulatedSender, WatchedFabric
from tests.simulation.loop import Process, VirtualClocks, VirtualLoop
from tests.simulation.model import MODEL, TOKENIZER, SimulatedRunner
from tests.simulation.redis import SimulatedLink, StoreServer
from tests.simulation.serving import Server, Serving
from tests.simulation.threads import Pace, SimulatedEngine, SimulatedReceivePump, SimulatedSendPump, WakingInbox
from tests.simulation.wires import Network, Weather

#: What a process has for ending the rest, in seconds.
STOP_S = 5.0

_tracing: Tracing | None = None


def _no_tracing() -> Tracing:
    global _tracing
    if _tracing is None:
        _tracing = setup_tracing("simulation", None, resource={})
    return _tracing


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a cell is, and its settings beside the defaults. drafts_right: how often a draft is right, None without any."""

    routers: int = 1
    prefills: int = 1
    decodes: int = 1
    page_tokens: int = 4
    decode_pages: int = 64
    prefill_pages: int = 64
    router: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    step_s: tuple[float, float] = (0.002, 0.01)
    drafts_right: float | None = None


@dataclass(frozen=True, slots=True)
class Making:
    """What a test may want to be wrong: `plant` gets each process when it has started, `scripts` each text of the store."""

    plant: Callable[["Host"], None] = lambda host: None
    scripts: Callable[[str], str] = str
    clocks: type[VirtualClocks] = VirtualClocks


class Host(Process):
    """A process with a server and an application, under a name and an address that it keeps over restarts."""

    def __init__(self, cell: "Cell", kind: str, number: int, run: int) -> None:
        super().__init__(f"{kind}-{number}")
        self.cell = cell
        self.kind = kind
        self.address = f"{self.name}:1"
        self.incarnation = f"{self.name}.run{run:012d}"
        self.server = Server(cell.network, self)
        self.application: Any = None
        self.engine: SimulatedEngine | None = None
        self.runner: SimulatedRunner | None = None
        self.ready = False
        self.drains = False
        self.crash: BaseException | None = None

    def accept(self, stream: Stream) -> Serving:
        """A client opens a stream to this process."""
        return Serving(self.server, stream)

    async def open(self, settings: ServerSettings, build: Callable[[Frame], Application]) -> None:
        """Starts the application. Runs in this process."""
        registry = MetricsRegistry(self.kind, "0", self.incarnation)
        frame = Frame(
            self.kind,
            self.name,
            self.address,
            self.incarnation,
            settings,
            _no_tracing(),
            registry,
            self._crashed,
            lambda: self.drains,
        )
        self.application = build(frame)
        self.application.add_to(self.server)
        await self.application.start()
        self.cell.making.plant(self)
        self.ready = True
        self.cell.network.servers[self.address] = self

    def _crashed(self, crash: BaseException) -> None:
        self.crash = crash
        self.cell.crashed(self, crash)


class Cell:
    """All processes of a world, living and dead."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        shape: Shape,
        weather: Weather,
        making: Making,
        after_turn: Callable[..., None],
    ) -> None:
        self.loop = loop
        self.shape = shape
        self.making = making
        self.network = Network(loop, random.Random(rng.random()), weather)
        self.fabric = WatchedFabric(random.Random(rng.random()))
        self.fabric.repeat_chance = 2 * weather.repeat_chance
        self.store = StoreServer(self.network, making.scripts)
        self.hosts: dict[str, Host] = {}
        self.buried: list[Host] = []
        self.faults: list[str] = []
        self.broken = asyncio.Event()
        self._runs = 0
        self._pace_rng = random.Random(rng.random())
        self._drafts_rng = random.Random("drafts")
        self._after_turn = after_turn

    def crashed(self, host: Host, crash: BaseException) -> None:
        """A process ended itself: never right."""
        self.faults.append(f"{host.name} crashed: {crash!r}")
        self.broken.set()

    async def start_all(self) -> None:
        """Members first, so that routers find them."""
        shape = self.shape
        members = [("decode", n) for n in range(shape.decodes)] + [("prefill", n) for n in range(shape.prefills)]
        for wave in (members, [("router", n) for n in range(shape.routers)]):
            await asyncio.gather(*(self.start(kind, number) for kind, number in wave))

    def start(self, kind: str, number: int) -> "asyncio.Task[None]":
        """A process starts, under the name of an earlier one that is dead or for the first time."""
        self._runs += 1
        host = Host(self, kind, number, self._runs)
        self.hosts[host.name] = host
        settings, build = getattr(self, f"_{kind}")(host)
        return self.loop.create_task(host.open(settings, build), context=host.context.copy())

    def kill(self, name: str) -> None:
        """kill -9."""
        host = self.hosts[name]
        host.dead = host.halted = True
        host.ready = False
        self.buried.append(host)
        if self.network.servers.get(host.address) is host:
            del self.network.servers[host.address]
        self.network.died(host)
        self.fabric.died(host)

    def drain(self, name: str, budget_s: float) -> "asyncio.Task[None]":
        """SIGTERM: the process ends in order, as rpc.serving does it, within a budget."""
        host = self.hosts[name]
        host.drains = True
        return self.loop.create_task(self._drained(host, budget_s), context=host.context.copy())

    @staticmethod
    async def _drained(host: Host, budget_s: float) -> None:
        host.application.begin_drain()
        waiting = asyncio.create_task(host.application.drained())
        await asyncio.wait([waiting], timeout=budget_s)
        waiting.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await host.application.stop()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        host = self.hosts[name]
        host.halted = True
        self.fabric.freeze_process(host, True)
        self.network.suspect({name})

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        host = self.hosts[name]
        if not host.dead:
            self.fabric.freeze_process(host, False)
            self.loop.resume(host)

    def living(self, kind: str) -> list[Host]:
        """Processes of a kind that are started and not dead."""
        return [host for host in self.hosts.values() if host.kind == kind and not host.dead and host.ready]

    # what each kind is made of

    def _threads(self, host: Host) -> dict[str, Any]:
        shape = self.shape

        def engine(worker: Any, inbox: Any, on_crash: Any) -> SimulatedEngine:
            pace = Pace(self._pace_rng, *shape.step_s, lambda done: self._after_turn(host, done))
            host.engine = SimulatedEngine(worker, inbox, on_crash, pace)
            return host.engine

        return {"make_inbox": WakingInbox, "make_engine": engine}

    def _load_runner(self, host: Host, pages: int) -> SimulatedRunner:
        host.runner = SimulatedRunner(self.shape.page_tokens, pages)
        return host.runner

    def _load_drafts(self) -> SimulatedDrafts | None:
        right = self.shape.drafts_right
        return None if right is None else SimulatedDrafts(self._drafts_rng, right)

    def _decode(self, host: Host) -> tuple[ServerSettings, Any]:
        shape = self.shape
        values = {"name": host.name, "page_tokens": shape.page_tokens, "total_pages": shape.decode_pages, "landing_rows": 4}
        settings = DecodeSettings(**{**values, **shape.decode})
        parts = DecodeParts(
            load_runner=partial(self._load_runner, host, shape.decode_pages),
            load_tokenizer=lambda: TOKENIZER,
            make_receiver=lambda name, slabs: SimulatedReceiver(self.fabric, name, slabs, host),
            model="simulated",
            dial=partial(Channel, self.network),
            make_sender=lambda name, slabs: SimulatedSender(self.fabric, name, slabs, host),
            make_pump=SimulatedReceivePump,
            make_send_pump=SimulatedSendPump,
            load_drafts=self._load_drafts,
            **self._threads(host),
        )
        return settings, member_of(lambda frame: self._keep(host, DecodeService(frame, settings, parts)))

    def _prefill(self, host: Host) -> tuple[ServerSettings, Any]:
        shape = self.shape
        values = {"name": host.name, "page_tokens": shape.page_tokens, "total_pages": shape.prefill_pages, "staging_rows": 4}
        settings = PrefillSettings(**{**values, **shape.prefill})
        parts = PrefillParts(
            load_runner=partial(self._load_runner, host, shape.prefill_pages),
            make_sender=lambda name, slabs: SimulatedSender(self.fabric, name, slabs, host),
            model="simulated",
            make_pump=SimulatedSendPump,
            **self._threads(host),
        )
        return settings, member_of(lambda frame: self._keep(host, PrefillService(frame, settings, parts)))

    def _router(self, host: Host) -> tuple[ServerSettings, Any]:
        shape = self.shape
        values = {
            "name": host.name,
            "decode": tuple(f"decode-{n}:1" for n in range(shape.decodes)),
            "prefill": tuple(f"prefill-{n}:1" for n in range(shape.prefills)) or ("none",),
            "redis_url": "redis://store:6379",
            "default_max_output_tokens": 16,
        }
        settings = RouterSettings(**{**values, **shape.router})
        outside = Outside(open_store=self._open_store, dial=partial(Channel, self.network))
        return settings, lambda frame: Router(frame, settings, lambda: LoadedModel(MODEL, TOKENIZER), outside)

    def _open_store(self, settings: Any, name: str, observe: Any) -> Any:
        return RedisStore(settings, name, observe, SimulatedLink(self.store, settings, observe))

    @staticmethod
    def _keep(host: Host, service: Any) -> Any:
        host.service = service  # type: ignore[attr-defined]
        return service

"""The chart's queries, a real Prometheus and the HPA's decisions over real members that start and drain while requests run."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

import models
from bench.scaling.hpa import Autoscaler, Behaviour, Bounds, Policy, Reading, Rules, Unit
from bench.scaling.queries import Scope, read
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import MEMBER_READY_S, MEMBER_STOP, Cell, CellOptions, running_cell
from tandem_cli.supervisor import Child
from tests.e2e.cells import Answer, ask, at_rest, greedy_request, stub_of
from tests.exact_dtype import EXACT_DTYPE
from tests.scaling.prometheus import NAMESPACE, Prometheus, running_prometheus
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCOPE = Scope(*(f'namespace="{NAMESPACE}",pod=~"{role}-.+"' for role in ("prefill", "decode", "router")), window="5s", cost="15s")
EVERY = [query for queries in read(SCOPE).values() for query in queries.values()]
QUERIES = read(SCOPE)["prefill"]
#: What one member may have: about a second of computing, and most of its time, by what it does and by what is offered.
TARGETS = {"backlog": 400.0, "busy": 0.7, "offered": 0.7}
#: The times of a cluster, thirty times as fast.
SYNC_S, WINDOW_S = 0.5, 5.0
BEHAVIOUR = Behaviour(Rules((Policy(Unit.PODS, 1, 1),), 0), Rules((Policy(Unit.PODS, 1, 1),), WINDOW_S))
PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 400, 6, 8
PATIENCE_S = 100.0


@dataclass
class Pool:
    """The prefill members of a cell, as a Deployment would hold them."""

    cell: Cell
    prometheus: Prometheus
    second_address: str
    second: Child | None = None
    gone: list[int] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        return 1 if self.second is None else 2

    async def scale(self, replicas: int) -> None:
        """Start the second member, or let it drain and go."""
        if replicas > self.replicas:
            flags = [*map(str, self.cell.prefill[0].process.args[4:-2])]  # type: ignore[index]
            flags[flags.index("--name") + 1] = "prefill-1"
            argv = [*flags, f"--listen={self.second_address}"]
            self.second = self.cell.supervisor.spawn("prefill-1", argv, MEMBER_STOP)
            await asyncio.to_thread(self.cell.supervisor.wait_ready, [self.second], MEMBER_READY_S)
            self.watched()
        elif replicas < self.replicas and self.second is not None:
            leaving, self.second = self.second, None
            leaving.process.send_signal(signal.SIGTERM)
            self.gone.append(await asyncio.to_thread(leaving.process.wait, PATIENCE_S))
            self.cell.supervisor.children.remove(leaving)
            self.watched()

    def watched(self) -> None:
        """Prometheus scrapes what there is."""
        found = [*self.cell.routers, *self.cell.prefill, *self.cell.decode, *([self.second] if self.second else [])]
        self.prometheus.watch({child.name: int(str(child.ready["metrics_port"])) for child in found})


@dataclass
class Loop:
    """The autoscaler's loop. `looks`: what it saw and decided."""

    pool: Pool
    scaler: Autoscaler = field(default_factory=lambda: Autoscaler(Bounds(1, 2), BEHAVIOUR))
    looks: list[tuple[dict[str, float | None], int]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            found = {name: await self.pool.prometheus.ask(QUERIES[name]) for name in TARGETS}
            readings = [Reading(name, found[name], target) for name, target in TARGETS.items()]
            decision = self.scaler.decide(time.monotonic(), self.pool.replicas, readings)
            self.looks.append((found, decision.replicas))
            await self.pool.scale(decision.replicas)
            await asyncio.sleep(SYNC_S)


@dataclass
class Load:
    """Requests, `at_once` of them at any time; no two have a prompt in common."""

    stub: pb_grpc.InferenceServiceStub
    at_once: int = AT_ONCE
    asked: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)

    async def run(self) -> None:
        running: set[asyncio.Task[None]] = set()
        while self.at_once or running:
            while len(running) < self.at_once:
                running.add(asyncio.create_task(self._one(self.asked)))
                self.asked += 1
            _, running = await asyncio.wait(running, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)

    async def _one(self, number: int) -> None:
        self.answers[number] = await ask(self.stub, greedy_request(prompt(number), OUTPUT_TOKENS))


def prompt(number: int) -> list[int]:
    return [1000 + (number * 7919 + place * 31) % 40_000 for place in range(PROMPT_TOKENS)]


@asynccontextmanager
async def looping(loop: Loop, load: Load) -> AsyncIterator[None]:
    """Both run; the load is over at the end of the block."""
    async with asyncio.TaskGroup() as group:
        deciding = group.create_task(loop.run())
        group.create_task(load.run())
        try:
            yield
        finally:
            load.at_once = 0
            deciding.cancel()


async def test_members_come_and_go_with_the_load_and_nothing_is_lost(tmp_path: Path) -> None:
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    with running_prometheus(tmp_path) as prometheus, running_cell(options(first, second), tmp_path) as cell:
        await until(prometheus.ready, PATIENCE_S, "Prometheus answers")
        pool = Pool(cell, prometheus, second)
        pool.watched()
        await until(lambda: answered(prometheus), PATIENCE_S, "every query has an answer")
        async with stub_of(cell) as stub:
            load, loop = Load(stub), Loop(pool)
            async with looping(loop, load):
                await until(lambda: second_computes(prometheus), PATIENCE_S, "a second member takes part")
                load.at_once = 1
                prometheus.watch({})
                await until(lambda: blind(loop), PATIENCE_S, "twenty looks at nothing")
                assert pool.replicas == 2 and {replicas for _, replicas in loop.looks[-20:]} == {2}
                pool.watched()
                await until(lambda: left(pool), PATIENCE_S, "the second member is gone")
            assert pool.gone == [0]
            assert set(load.answers) == set(range(load.asked))
            ends = {number: (one.status, one.details, one.completed) for number, one in load.answers.items()}
            assert {number: end for number, end in ends.items() if end[0] is not grpc.StatusCode.OK} == {}
            assert {one.reason for one in load.answers.values()} == {"max_output_tokens"}
            for number in range(0, load.asked, max(1, load.asked // 6)):
                again = await ask(stub, greedy_request(prompt(number), OUTPUT_TOKENS))
                assert again.token_ids == load.answers[number].token_ids
        await at_rest(cell)


def options(first: str, second: str) -> CellOptions:
    """A cell whose routers know two prefill members, of which one is there."""
    extra = (
        *((role, "--context-tokens=1024") for role in ("prefill", "decode")),
        ("prefill", "--max-step-tokens=128"),
        ("prefill", f"--listen={first}"),
        ("router", f"--prefill={first},{second}"),
    )
    models.pull(models.DEFAULT_MODEL)
    return CellOptions(
        models.DEFAULT_MODEL,
        dtype=EXACT_DTYPE,
        listen="127.0.0.1:0",
        kv_tokens=8192,
        lend_cores=False,
        log_level="warning",
        extra=extra,
    )


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


async def answered(prometheus: Prometheus) -> bool:
    return all([await prometheus.ask(query) is not None for query in EVERY])


async def second_computes(prometheus: Prometheus) -> bool:
    computed = await prometheus.ask('tandem_prefill_computed_tokens_total{pod="prefill-1"}')
    return computed is not None and computed > PROMPT_TOKENS


async def blind(loop: Loop) -> bool:
    """Whether the last twenty looks, longer than the window of shrinking, saw nothing."""
    last = loop.looks[-20:]
    return len(last) == 20 and all(value is None for found, _ in last for value in found.values())


async def left(pool: Pool) -> bool:
    return bool(pool.gone)

"""What the processes of a cell hold, say and take: at rest nothing is held, and over many rounds nothing grows."""

import asyncio
import re
import urllib.request
from dataclasses import dataclass, field

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from rpc.channels import client_options
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tests.chaos.cell import NAMES, ChaosCell, Process, Size, size_of
from tests.e2e.cells import STANDING, held
from tests.waiting import until

#: For everything to be given back after a round: a dead router's lease has to run out, and a lost writer to be cut off.
REST_S = 60.0
SCRAPE_S = 5.0
#: Log lines of faults in the program; what is lost or late is told in other words.
_FAULT = re.compile(
    r"Traceback|never retrieved|was destroyed but it is pending|never awaited|\"critical\"|failed inside the router"
)

#: Rounds after which a process has everything that it makes once.
WARM_ROUNDS = 3
#: What a process may take more than when it was warm, whatever happens to it, and for each start of a peer that it met.
#: Memory of a member grows by the kernels for each class of step lengths that it had not seen (engine/kernels.py).
SLACK = Size(rss_mib=256.0, threads=8, descriptors=32)
ROUTER_SLACK = Size(rss_mib=48.0, threads=8, descriptors=32)
FOR_A_PEER = Size(rss_mib=6.0, threads=2, descriptors=16)


async def at_rest(cell: ChaosCell) -> None:
    """Every process: no fault, nothing held, gauges zero. Waits for what is still being released, within REST_S."""
    async with asyncio.timeout(3 * REST_S):
        for name in NAMES:
            await _resting(cell[name])


async def _resting(process: Process) -> None:
    last: dict[str, object] = {}

    async def nothing() -> bool:
        async with grpc.aio.insecure_channel(process.address, options=client_options()) as channel:
            try:
                answer = await member_pb2_grpc.AdminServiceStub(channel).Check(member_pb2.CheckRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                last["check"] = f"{error.code()} {error.details()}"
                return False
        last.update(check="", books=held(answer), faults=list(answer.faults))
        if last["books"] or last["faults"]:
            return False
        last["gauges"] = await asyncio.to_thread(_gauges, process)
        return not last["gauges"]

    try:
        await until(nothing, REST_S, "at rest")
    except AssertionError as error:
        raise AssertionError(f"{process.name} does not come to rest: {last}") from error


def _gauges(process: Process) -> dict[str, float]:
    """Gauges that are not zero and should be."""
    address = f"http://{process.address.rpartition(':')[0]}:{process.ready['metrics_port']}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=SCRAPE_S) as page:
        text = page.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if family.type != "gauge" or not family.name.startswith("tandem_") or STANDING.search(family.name):
            continue
        for sample in family.samples:
            free = sample.labels.get("state") in ("free", "cached")
            if sample.value and not free:
                found[f"{sample.name}{sample.labels or ''}"] = sample.value
    return found


@dataclass(slots=True)
class Watch:
    """Reads logs on, and keeps the sizes of processes from round to round."""

    _offsets: dict[str, int] = field(default_factory=dict)
    _rounds: dict[str, int] = field(default_factory=dict)
    _warm: dict[str, Size] = field(default_factory=dict)
    _peers: dict[str, int] = field(default_factory=dict)

    def log_faults(self, cell: ChaosCell) -> list[str]:
        """New lines that tell of a fault in the program."""
        found = []
        for log in sorted(cell.folder.glob("*.log")):
            with log.open("rb") as lines:
                lines.seek(self._offsets.get(log.name, 0))
                new = lines.read()
                self._offsets[log.name] = lines.tell()
            text = new.decode(errors="replace")
            found += [f"{log.name}: {line[:600]}" for line in text.splitlines() if _FAULT.search(line)]
        return found

    def measure(self, cell: ChaosCell) -> list[str]:
        """Sentences about processes that have grown over what they may. To be called at rest, once a round."""
        found = []
        starts = sum(process.starts for process in cell.processes.values())
        for name in NAMES:
            process = cell[name]
            assert process.popen is not None
            start = f"{name}.{process.starts}"
            self._rounds[start] = self._rounds.get(start, 0) + 1
            size = size_of(process.popen.pid)
            if self._rounds[start] <= WARM_ROUNDS:
                self._warm[start], self._peers[start] = size, starts
                continue
            warm, peers = self._warm[start], starts - self._peers[start]
            slack = ROUTER_SLACK if process.role == "router" else SLACK
            bound = Size(
                warm.rss_mib + slack.rss_mib + peers * FOR_A_PEER.rss_mib,
                warm.threads + slack.threads + peers * FOR_A_PEER.threads,
                warm.descriptors + slack.descriptors + peers * FOR_A_PEER.descriptors,
            )
            if size.rss_mib > bound.rss_mib or size.threads > bound.threads or size.descriptors > bound.descriptors:
                found.append(f"{start} grew in {self._rounds[start]} rounds, {peers} starts of others, from {warm} to {size}")
        return found

    def sizes(self, cell: ChaosCell) -> str:
        """For people: how much every process takes now, against when it was warm."""
        words = []
        for name in NAMES:
            process = cell[name]
            start, size = f"{name}.{process.starts}", size_of(process.popen.pid)  # type: ignore[union-attr]
            warm = self._warm.get(start, size)
            words.append(
                f"{start} ({self._rounds.get(start, 0)} rounds): {warm.rss_mib:.0f} → {size.rss_mib:.0f} MiB, "
                f"{warm.threads} → {size.threads} threads, {warm.descriptors} → {size.descriptors} descriptors"
            )
        return "\n".join(words)

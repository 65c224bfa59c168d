"""What it costs when something is taken away: each run drives a cell of real processes and returns what its clients saw."""

import asyncio
import signal
import statistics
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from bench.timeline import NeverCame, prompt_request, streams
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tandem_cli.load.measured import quantile
from tests.chaos.cell import ChaosCell, Process
from tests.waiting import until

#: Running beside a request that is cancelled, and beside one whose decode member is killed.
LIVE_BESIDE = 7
PROMPT_TOKENS = 512
DRAIN_SEQUENCES = 16
#: Of a slow reader's run: deltas before it stops, and tokens of the request beside it.
SLOW_READ_DELTAS = 3
#: Enough text to fill what lies between, whatever its tokens say.
SLOW_TOKENS = 1800
SLOW_BESIDE_TOKENS = 500
SETTLE_S = 60.0
#: Tokens of a killed member that were on their way to the client come within that time; no other member is that fast.
IN_FLIGHT_S = 0.05

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `values`: one for each sample, in `unit`; `beside`: what else is worth saying."""

    what: str
    unit: str
    values: tuple[float, ...]
    beside: str = ""

    def cells(self) -> list[str]:
        """As text: samples, median and 99th percentile."""
        if not self.values:
            return [self.what, "0", "-", "-", self.unit, self.beside]
        digits = 3 if self.unit == "ratio" else 0 if self.unit == "steps" else 1
        shown = [f"{figure:.{digits}f}" for figure in (statistics.median(self.values), quantile(self.values, 0.99))]
        return [self.what, str(len(self.values)), *shown, self.unit, self.beside]


def metric(process: Process, name: str) -> float:
    """One value from a process's metrics, 0 when it is not shown."""
    address = f"http://{process.address.rpartition(':')[0]}:{process.ready['metrics_port']}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


async def record_of(cell: ChaosCell, request_id: str) -> pb.RequestRecord:
    """The record as the first router has it."""
    async with connect(cell.routers[0]) as stub:
        return (await stub.Get(pb.GetRequest(request_id=request_id), timeout=10)).record


async def cancels(cell: ChaosCell, samples: int, tell: Tell) -> list[Row]:
    """Cancel of one of eight sequences of one decode member, until its pages are free."""
    await _without(cell, "decode-1")
    steps: list[float] = []
    at_decode: list[float] = []
    at_client: list[float] = []
    beside = [prompt_request(number, 64, 900) for number in range(LIVE_BESIDE)]
    async with connect(cell.routers[1]) as other, streams(cell.routers[0], beside) as live:
        for timeline in live:
            await timeline.until_deltas(1)
        for sample in range(samples):
            request = prompt_request(100 + sample, 64, 900)
            async with streams(cell.routers[0], [request]) as (timeline,):
                await timeline.until_deltas(4)
                before, asked_at = metric(cell["decode-0"], "tandem_decode_step_seconds_count"), time.monotonic()
                await other.Cancel(pb.CancelRequest(request_id=request.request_id), timeout=30)
                await timeline.until_end()
                after = metric(cell["decode-0"], "tandem_decode_step_seconds_count")
            if timeline.completed is None or not timeline.completed.timings.HasField("cancel_effective_s"):
                raise NeverCame(f"{request.request_id} was not cancelled: {timeline.failure}")
            steps.append(after - before)
            at_decode.append(1e3 * timeline.completed.timings.cancel_effective_s)
            at_client.append(1e3 * (timeline.ended_at - asked_at))
            tell(f"cancel {sample + 1}: {at_decode[-1]:.1f} ms, {steps[-1]:.0f} steps")
    await cell.whole()
    note = f"of {LIVE_BESIDE + 1} live sequences, through the other router"
    return [
        Row("cancel → pages free", "ms", tuple(at_decode), note),
        Row("cancel → pages free", "steps", tuple(steps), "steps that ended from the call of Cancel to the terminal event"),
        Row("cancel → terminal event at the client", "ms", tuple(at_client), "from the call of Cancel"),
    ]


async def decode_killed(cell: ChaosCell, samples: int, tell: Tell) -> list[Row]:
    """kill -9 of a decode member, until the next token of each stream that it was serving."""
    waits: list[float] = []
    for sample in range(samples):
        requests = [prompt_request(1000 + 10 * sample + number, 96, 400) for number in range(4)]
        async with streams(cell.routers[0], requests) as live:
            for timeline in live:
                await timeline.until_deltas(8)
            victim = (await record_of(cell, live[0].request_id)).decode_member
            hit = [one for one in live if (await record_of(cell, one.request_id)).decode_member == victim]
            killed_at = time.monotonic()
            cell[victim].send(signal.SIGKILL)
            came = [await timeline.until_after(killed_at + IN_FLIGHT_S) for timeline in hit]
            waits += [1e3 * (at - killed_at) for at in came]
        tell(f"decode killed {sample + 1}: {', '.join(f'{wait:.0f}' for wait in waits[-len(hit) :])} ms")
        await cell.whole()
    return [Row("decode killed → next token at the client", "ms", tuple(waits), "96 tokens in; computed again by prefill")]


async def prefill_killed(cell: ChaosCell, samples: int, tell: Tell) -> list[Row]:
    """kill -9 of a prefill member in the middle of a prompt, until the first token."""
    undisturbed: list[float] = []
    waits: list[float] = []
    for sample in range(samples):
        async with streams(cell.routers[0], [prompt_request(2000 + sample, PROMPT_TOKENS, 2)]) as (timeline,):
            await timeline.until_deltas(1)
            undisturbed.append(1e3 * (timeline.tokens[0][0] - timeline.asked_at))
        async with streams(cell.routers[0], [prompt_request(3000 + sample, PROMPT_TOKENS, 8)]) as (timeline,):
            # Half of what the whole way takes: somewhere in the prompt.
            await asyncio.sleep(undisturbed[-1] / 2e3)
            victim = (await record_of(cell, timeline.request_id)).prefill_member
            if timeline.tokens or not victim:
                tell(f"prefill killed {sample + 1}: too late, not counted")
                continue
            killed_at = time.monotonic()
            cell[victim].send(signal.SIGKILL)
            waits.append(1e3 * (await timeline.until_after(killed_at) - killed_at))
        tell(f"prefill killed {sample + 1}: {waits[-1]:.0f} ms, undisturbed {undisturbed[-1]:.0f} ms")
        await cell.whole()
    return [
        Row(
            "prefill killed → first token at the client", "ms", tuple(waits), f"{PROMPT_TOKENS} tokens in; from the kill, halfway"
        ),
        Row("undisturbed: request → first token", "ms", tuple(undisturbed), "in the same run"),
    ]


async def drained(cell: ChaosCell, samples: int, tell: Tell) -> list[Row]:
    """SIGTERM to a decode member with 16 live sequences, until it has ended; and the pause that each sequence had."""
    took: list[float] = []
    pauses: list[float] = []
    moved = 0
    for sample in range(samples):
        await _without(cell, "decode-1")
        requests = [prompt_request(4000 + 100 * sample + number, 64, 400) for number in range(DRAIN_SEQUENCES)]
        async with streams(cell.routers[0], requests) as live:
            for timeline in live:
                await timeline.until_deltas(2)
            await cell.whole()
            running = [timeline for timeline in live if not timeline.over]
            began = time.monotonic()
            cell["decode-0"].send(signal.SIGTERM)
            await cell["decode-0"].ended(SETTLE_S)
            took.append(1e3 * (time.monotonic() - began))
            for timeline in running:
                if not timeline.over:
                    await timeline.until_after(time.monotonic())
                pauses.append(1e3 * timeline.longest_gap_s(began))
            records = [await record_of(cell, timeline.request_id) for timeline in running]
            moved += sum(record.decode_member == "decode-1" for record in records)
            failed = [timeline.failure for timeline in running if timeline.failure]
        if failed:
            raise NeverCame(f"{len(failed)} of {len(running)} sequences did not live through the drain: {failed[0]}")
        tell(f"drain {sample + 1}: {took[-1]:.0f} ms with {len(running)} live sequences, {moved} moved so far")
        await cell.whole()
    return [
        Row(f"drain of a decode member with {DRAIN_SEQUENCES} live sequences", "ms", tuple(took), "SIGTERM to the process's end"),
        Row("longest pause of one sequence in it", "ms", tuple(pauses), f"{moved} of {len(pauses)} moved to the other member"),
    ]


async def slow_reader(cell: ChaosCell, samples: int, tell: Tell) -> list[Row]:
    """Inter-token times of one request, with and without a reader beside it that has stopped reading. Interleaved pairs."""
    await _without(cell, "decode-1")
    ratios: list[float] = []
    figures: dict[bool, list[float]] = {True: [], False: []}
    for sample in range(samples):
        pair: dict[bool, float] = {}
        for stopped in (True, False) if sample % 2 else (False, True):
            pair[stopped] = await _beside(cell, 5000 + 10 * sample + int(stopped), stopped=stopped)
            figures[stopped].append(1e3 * pair[stopped])
        ratios.append(pair[True] / pair[False])
        tell(f"slow reader {sample + 1}: p99 {1e3 * pair[True]:.1f} ms with, {1e3 * pair[False]:.1f} ms without")
    await cell.whole()
    return [
        Row("inter-token p99 beside a stopped reader", "ms", tuple(figures[True])),
        Row("inter-token p99 without one", "ms", tuple(figures[False]), "in the same run, in turns"),
        Row("the first against the second", "ratio", tuple(ratios), "must stay within 5 % of 1 (median over the pairs)"),
    ]


async def _beside(cell: ChaosCell, number: int, *, stopped: bool) -> float:
    """99th percentile of one request's inter-token time, in seconds."""
    slow = [prompt_request(number + 2, 64, SLOW_TOKENS)] if stopped else []
    async with streams(cell.routers[0], slow, SLOW_READ_DELTAS):

        async def paused() -> bool:
            found = await asyncio.to_thread(metric, cell["decode-0"], "tandem_decode_paused_sequences")
            return found == len(slow)

        await until(paused, SETTLE_S, f"{len(slow)} sequences are paused")
        async with streams(cell.routers[0], [prompt_request(number, 64, SLOW_BESIDE_TOKENS)]) as (timeline,):
            await timeline.until_end()
        if timeline.failure:
            raise NeverCame(f"the request beside the slow reader failed: {timeline.failure}")
        return quantile(timeline.gaps_s(), 0.99)


async def _without(cell: ChaosCell, name: str) -> None:
    """The cell but for one decode member."""
    await cell.whole()
    cell[name].send(signal.SIGKILL)
    await cell[name].ended(SETTLE_S)
    for address in cell.routers:
        async with connect(address) as stub:

            async def gone(stub=stub) -> bool:  # type: ignore[no-untyped-def]
                models = (await stub.ListModels(pb.ListModelsRequest(), timeout=5)).models
                return bool(models) and models[0].decode_members == 1

            await until(gone, SETTLE_S, f"{name} is gone")

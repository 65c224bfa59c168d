"""Routers over members that make tokens for nothing: what they add to a first token, what they relay, what a request costs them.

Everything is a process of its own: members, store, routers, and the client that measures.
"""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from bench.relay import ROOT, cpu_s, router
from router.embedded import EmbeddedServer
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc, grant_pb2, prefill_pb2, prefill_pb2_grpc
from tandem_cli.load.measured import quantile
from tests.fake_members import fake_pools
from tests.router_world import SNAPSHOT, Client, request

#: More than any run makes.
MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class MemberPeer:
    """A member as a client has to name it."""

    name: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class World:
    """Processes of one measurement."""

    routers: list[tuple[str, "subprocess.Popen[str]"]]
    prefill: MemberPeer
    decode: MemberPeer


async def members(hold: str, tokens: int) -> None:
    """Serves one prefill and one decode member until stdin ends.

    hold: where requests stay: "queued" (no pages are free), "running" (no token is made), or "" for nowhere.
    """
    info = {"total_pages": MANY, "context_tokens": tokens + 100, "max_sequences": 10_000}
    async with fake_pools(1, 1, info) as (prefill, decode):
        decode[0].load.free_pages = 0 if hold == "queued" else MANY
        decode[0].script.tokens = tokens
        if hold == "running":
            decode[0].script.output.hold()
        print(json.dumps([[one.name, one.incarnation, one.address] for one in (prefill[0], decode[0])]), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def answer_memory() -> None:
    """Print the bytes that Python has allocated, each time a line comes."""
    for _ in sys.stdin:
        gc.collect()
        print(json.dumps(tracemalloc.get_traced_memory()[0]), flush=True)


def child(*arguments: str, trace: bool = False) -> "subprocess.Popen[str]":
    """This program in another role."""
    options = ["-X", "tracemalloc"] if trace else []
    command = [sys.executable, *options, "-m", "bench.growth.routers", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def world(routers: int, tokens: int, *, hold: str = "", trace: bool = False) -> Iterator[World]:
    """Started processes; everything is stopped at the end."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(EmbeddedServer())
        fakes = child("members", hold or "-", str(tokens))
        stack.callback(_stop, fakes)
        assert fakes.stdout is not None
        prefill, decode = (MemberPeer(*fields) for fields in json.loads(fakes.stdout.readline()))
        started = []
        for _ in range(routers):
            process = child("router", store.url, prefill.address, decode.address, str(tokens), trace=trace)
            stack.callback(_stop, process)
            assert process.stdout is not None
            started.append((process.stdout.readline().split()[1], process))
        yield World(started, prefill, decode)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.communicate()


# what is measured


async def _relay(world: World, streams: int, tokens: int) -> dict[str, float]:
    clients = [Client(address) for address, _ in world.routers]
    for number, client in enumerate(clients):
        await client.generate(request(f"warm-{number}", max_output_tokens=tokens))
    pids = [process.pid for _, process in world.routers]
    before, began = [cpu_s(pid) for pid in pids], time.perf_counter()
    calls = [
        clients[number % len(clients)].generate(request(f"r{number}", max_output_tokens=tokens)) for number in range(streams)
    ]
    answers = await asyncio.gather(*calls)
    seconds = time.perf_counter() - began
    cpu = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    arrived = sum(len(answer.events) - 2 for answer in answers)
    assert arrived == streams * tokens, f"{arrived} tokens arrived, {streams * tokens} were asked for"
    for client in clients:
        await client.channel.close()
    return {
        "tokens_per_s": arrived / seconds,
        "tokens_per_cpu_s": arrived / sum(cpu),
        "cpu_us_per_token": sum(cpu) / arrived * 1e6,
    }


def relay(routers: int, streams: int = 16, tokens: int = 2000) -> dict[str, float]:
    """Tokens relayed a second of time, and a second of router CPU: what a core would relay that does nothing else."""
    with world(routers, tokens) as found:
        return uvloop.run(_relay(found, streams, tokens))


async def _first_tokens(world: World, samples: int) -> dict[str, float]:
    client = Client(world.routers[0][0])
    through, direct = [], []
    async with _direct(world) as once:
        for number in range(samples + 20):
            began, first_at = time.perf_counter(), 0.0
            async for event in client.stub.Generate(request(f"t{number}", "x" * 256, max_output_tokens=2)):
                if event.WhichOneof("event") == "delta" and not first_at:
                    first_at = time.perf_counter()
            through.append(first_at - began)
            began = time.perf_counter()
            direct.append(await once(number) - began)
    await client.channel.close()
    through, direct = through[20:], direct[20:]
    return {
        "through_p50_ms": quantile(through, 0.5) * 1e3,
        "direct_p50_ms": quantile(direct, 0.5) * 1e3,
        "added_p50_ms": (quantile(through, 0.5) - quantile(direct, 0.5)) * 1e3,
    }


def first_tokens(samples: int = 200) -> dict[str, float]:
    """Time to the first token through a router, and by asking the same members for the same without one, in turns."""
    with world(1, 400) as found:
        return uvloop.run(_first_tokens(found, samples))


@contextlib.asynccontextmanager
async def _direct(world: World) -> AsyncIterator[Any]:
    """A client that asks the members itself: seat, grant, prefill, first output."""
    async with (
        grpc.aio.insecure_channel(world.decode.address) as to_decode,
        grpc.aio.insecure_channel(world.prefill.address) as to_prefill,
    ):
        seats: Any = decode_pb2_grpc.DecodeServiceStub(to_decode)
        prompts: Any = prefill_pb2_grpc.PrefillServiceStub(to_prefill)
        prefill = grant_pb2.Peer(member=world.prefill.name, incarnation=world.prefill.incarnation, address=world.prefill.address)

        async def once(number: int) -> float:
            key = grant_pb2.AttemptKey(request_id=f"d{number}", attempt=1)
            opening = decode_pb2.Open(
                key=key,
                model_snapshot=SNAPSHOT,
                incarnation=world.decode.incarnation,
                prompt_token_ids=[120] * 256,
                max_output_tokens=2,
                first_sequence_no=1,
                prefill=prefill,
            )
            call = seats.Decode()
            await call.write(decode_pb2.DecodeRequest(open=opening))
            granted = (await call.read()).granted
            asked = prefill_pb2.PrefillRequest(key=key, prompt_token_ids=[120] * 256, grant=granted.grant)
            reading = asyncio.ensure_future(_all(prompts.Prefill(asked)))
            while (await call.read()).WhichOneof("event") != "output":
                pass
            first_at = time.perf_counter()
            await reading
            call.cancel()
            return first_at

        yield once


async def _all(call: Any) -> None:
    async for _ in call:
        pass


async def _memory(world: World, hold: str, few: int, many: int) -> float:
    address, process = world.routers[0]
    client = Client(address)
    readings, tasks = [], []
    for count in (few, many):
        begun = [client.begin(request(f"m{number}", "x" * 256, max_output_tokens=8)) for number in range(len(tasks), count)]
        tasks += begun
        if hold:
            states = {"queued": "queued", "running": "decoding"}
            for number in range(count):
                await client.until_state(f"m{number}", states[hold], timeout_s=60)
        else:
            await asyncio.gather(*begun)
        readings.append(await asyncio.to_thread(_traced, process))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.channel.close()
    return (readings[1] - readings[0]) / (many - few)


def _traced(process: "subprocess.Popen[str]") -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(json.loads(process.stdout.readline()))


def memory(hold: str, few: int = 100, many: int = 500) -> float:
    """Bytes of Python objects that one more request costs its router: "queued", "running" (before its first token), or "" (its
    stream is kept after its end)."""
    with world(1, 400, hold=hold, trace=True) as found:
        return uvloop.run(_memory(found, hold, few, many))


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "members":
        uvloop.run(members(arguments[0].strip("-"), int(arguments[1])))
    else:
        if tracemalloc.is_tracing():
            threading.Thread(target=answer_memory, daemon=True).start()
        sys.exit(router(*arguments[:3], int(arguments[3])))

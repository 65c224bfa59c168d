"""How many tokens a second one router relays, and what a token costs it, with members that make tokens for nothing.

Three processes: fake members, the router, this client. `python -m bench.relay --streams 16 --tokens 2000`
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from router.embedded import EmbeddedServer
from router.service import LoadedModel, Router
from rpc.serving import run
from tests.fake_members import fake_pools
from tests.router_world import MODEL, ByteTokenizer, Client, request, settings

ROOT = Path(__file__).resolve().parent.parent
TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


async def members(tokens: int) -> None:
    """Serves one prefill and one decode member until stdin ends; prints their addresses."""
    info = {"total_pages": 1_000_000, "context_tokens": tokens + 100, "max_sequences": 10_000}
    async with fake_pools(1, 1, info) as (prefill, decode):
        decode[0].load.free_pages = 1_000_000
        decode[0].script.tokens = tokens
        print(json.dumps([prefill[0].address, decode[0].address]), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def router(url: str, prefill: str, decode: str, tokens: int) -> int:
    """Runs a router in this process until a signal."""
    mine = settings(url, "bench", [prefill], [decode], log_level="error")
    model = type(MODEL)(MODEL.name, MODEL.snapshot, tokens + 100, MODEL.vocabulary_size)
    return run(lambda frame: Router(frame, mine, lambda: LoadedModel(model, ByteTokenizer())), mine, "router")


def child(*arguments: str) -> subprocess.Popen[str]:
    """This program in another role."""
    command = [sys.executable, "-m", "bench.relay", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICKS_S


async def measure(address: str, pid: int, streams: int, tokens: int) -> dict[str, float]:
    """Runs all streams at once and counts what arrives."""
    client = Client(address)
    warm = await client.generate(request("warm", max_output_tokens=tokens))
    assert len(warm.events) == tokens + 2, warm.error
    cpu, began = cpu_s(pid), time.monotonic()
    calls = [client.generate(request(f"r{number}", max_output_tokens=tokens)) for number in range(streams)]
    answers = await asyncio.gather(*calls)
    seconds, cpu = time.monotonic() - began, cpu_s(pid) - cpu
    arrived = sum(len(answer.events) - 2 for answer in answers)
    assert arrived == streams * tokens
    await client.channel.close()
    return {
        "streams": streams,
        "tokens": arrived,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(arrived / seconds),
        "router_cpu_us_per_token": round(cpu / arrived * 1e6, 1),
    }


def main() -> None:
    """Starts everything, measures, prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each request")
    parser.add_argument("--role", choices=["members", "router"], help=argparse.SUPPRESS)
    parser.add_argument("addresses", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "members":
        uvloop.run(members(options.tokens))
        return
    if options.role == "router":
        sys.exit(router(*options.addresses, options.tokens))
    with EmbeddedServer() as store:
        fakes = child("--role", "members", "--tokens", str(options.tokens))
        assert fakes.stdout is not None
        prefill, decode = json.loads(fakes.stdout.readline())
        relay = child("--role", "router", "--tokens", str(options.tokens), store.url, prefill, decode)
        assert relay.stdout is not None
        try:
            address = relay.stdout.readline().split()[1]
            print(json.dumps(uvloop.run(measure(address, relay.pid, options.streams, options.tokens))))
        finally:
            for process in (relay, fakes):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()

"""A member in a process of its own: ready, drained, cut, crashed, stopped twice."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest

from rpc.channels import internal_channel
from rpc.status import details_from
from tandem.pools.v1 import grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Child:
    """A running member and clients of it."""

    def __init__(self, *flags):
        self.flags = flags

    async def __aenter__(self):
        self.pipe, write_end = os.pipe()
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
        command = [
            sys.executable,
            "-m",
            "tests.unit.member_example",
            "--ready-fd",
            str(write_end),
            "--drain-settle-s",
            "0",
            *self.flags,
        ]
        self.process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=env, pass_fds=[write_end], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        os.close(write_end)
        self.channel = None
        return self

    async def __aexit__(self, *exc):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        if self.channel is not None:
            await self.channel.close()
        os.close(self.pipe)

    async def ready(self):
        """The line on the ready descriptor; {} when the process ended without one."""
        line = await asyncio.wait_for(asyncio.to_thread(self._read_line), 30)
        news = json.loads(line) if line else {}
        if news:
            self.channel = internal_channel(news["address"])
            self.prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        return news

    def _read_line(self):
        with os.fdopen(os.dup(self.pipe), encoding="utf-8") as pipe:
            return pipe.read()  # to its end: the process closes it

    def call(self, request_id="r1"):
        return self.prefill.Prefill(prefill_pb2.PrefillRequest(key=grant_pb2.AttemptKey(request_id=request_id, attempt=1)))

    async def ended(self):
        """Exit code and the log as dicts."""
        _, errors = await asyncio.wait_for(self.process.communicate(), 30)
        lines = errors.decode().splitlines()
        return self.process.returncode, [json.loads(line) for line in lines if line.startswith("{")], lines


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(call.read(), 10)
    return details_from(failed.value)


async def test_ready_then_watched_then_drained():
    async with Child("--name", "p1", "--drain-settle-s", "0.3") as child:
        news = await child.ready()
        assert news["kind"] == "prefill" and news["name"] == "p1" and news["pid"] == child.process.pid
        assert news["metrics_port"] > 0
        watch = member_pb2_grpc.MemberServiceStub(child.channel).Watch(member_pb2.WatchRequest(router="r"))
        first = await watch.read()
        assert first.info.peer.address == news["address"] and first.info.peer.incarnation == news["incarnation"]
        child.process.send_signal(signal.SIGTERM)
        seen = first
        while not seen.load.draining:
            seen = await asyncio.wait_for(watch.read(), 10)
        assert (await failure(watch)).reason == "DRAINING"
        code, log, _ = await child.ended()
        assert code == 0
        assert [line["level"] for line in log if line["level"] != "INFO"] == []


async def test_gateways_read_a_member_under_other_names_when_asked():
    async with Child("--metrics-aliases", "vllm") as child:
        news = await child.ready()
        await child.call().read()
        url = f"http://127.0.0.1:{news['metrics_port']}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as answer:
            text = answer.read().decode()
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in text
        used = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
        assert float(used.split()[1]) == pytest.approx(0.1), "one of ten pages"
        assert 'block_size="16"' in text and "tandem_event_loop_lag_seconds" in text


async def test_b41_what_runs_past_the_budget_gets_a_typed_end():
    async with Child("--drain-timeout-s", "0.5") as child:
        await child.ready()
        call = child.call()
        await call.read()
        child.process.send_signal(signal.SIGINT)
        found = await failure(call)
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "STOPPED")
        code, _, _ = await child.ended()
        assert code == 75


async def test_a_crash_tells_the_streams_and_ends_the_process():
    async with Child() as child:
        await child.ready()
        other = child.call("r1")
        await other.read()
        call = child.call("crash")
        await call.read()
        assert (await failure(call)).reason == "STOPPED"
        assert (await failure(other)).reason == "STOPPED"
        code, log, _ = await child.ended()
        assert code == 70
        (line,) = (line for line in log if line["level"] == "CRITICAL")
        assert "ZeroDivisionError: the engine broke" in line["exception"]


async def test_a_second_signal_quits_at_once():
    async with Child("--drain-timeout-s", "60") as child:
        await child.ready()
        call = child.call()
        await call.read()
        watch = member_pb2_grpc.MemberServiceStub(child.channel).Watch(member_pb2.WatchRequest(router="r"))
        child.process.send_signal(signal.SIGTERM)
        while not (await asyncio.wait_for(watch.read(), 10)).load.draining:
            pass
        child.process.send_signal(signal.SIGTERM)
        code, _, _ = await child.ended()
        assert code == 128 + signal.SIGTERM


async def test_a_start_that_fails_says_why():
    async with Child("--fail-start") as child:
        assert await child.ready() == {}
        code, _, lines = await child.ended()
        assert code == 1
        assert "tandem prefill: cannot start: the model file m.gguf is not there" in lines


async def test_a_signal_while_loading_ends_it():
    async with Child("--hang-start") as child:
        assert await asyncio.wait_for(child.process.stdout.readline(), 30) == b"loading\n"
        child.process.send_signal(signal.SIGTERM)
        code, _, _ = await child.ended()
        assert code == 0


async def test_a_bad_setting_says_so():
    async with Child("--page-tokens", "0") as child:
        code, _, lines = await child.ended()
        assert code == 2
        assert lines == [
            "member-example: flag --page-tokens is '0'; it must be a whole number of tokens, at least 1, at most 1024"
        ]

"""Watch, on a real server."""

import asyncio

import grpc
import pytest

from member import watch
from member.watch import MemberInfo, MemberLoad, MemberRole, MemberServicer
from rpc.channels import internal_channel
from rpc.interceptors import CallGuard
from rpc.status import details_from
from tandem.pools.v1 import member_pb2, member_pb2_grpc

INFO = MemberInfo(
    "decode-1", "abc", "127.0.0.1:1", MemberRole.DECODE, "m", "snap", "layout", 16, 100, 2048, 49152, 8, computes_prompts=True
)


class Watched:
    async def __aenter__(self):
        self.load = MemberLoad(free_pages=99)
        self.draining = False
        self.looks = 0
        self.ends = asyncio.Queue()
        self.crashes = asyncio.Queue()
        self.servicer = MemberServicer(lambda: INFO, self.look, lambda: self.draining, self.crashes.put_nowait)
        self.server = grpc.aio.server(interceptors=[CallGuard(lambda *end: self.ends.put_nowait(end))])
        member_pb2_grpc.add_MemberServiceServicer_to_server(self.servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = internal_channel(f"127.0.0.1:{port}")
        self.stub = member_pb2_grpc.MemberServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc):
        await self.servicer.close()
        await self.channel.close()
        await self.server.stop(0)

    def look(self):
        self.looks += 1
        if isinstance(self.load, Exception):
            raise self.load
        return self.load

    def watch(self):
        return self.stub.Watch(member_pb2.WatchRequest(router="r"))


@pytest.fixture
async def watched():
    async with Watched() as made:
        yield made


async def read(call):
    return await asyncio.wait_for(call.read(), 10)


async def test_first_the_description_then_changes(watched):
    call = watched.watch()
    first = await read(call)
    assert first.info.peer.member == "decode-1" and first.info.role == member_pb2.MEMBER_ROLE_DECODE
    assert first.info.computes_prompts and first.info.vocabulary_size == 49152
    assert first.load.free_pages == 99
    watched.load = MemberLoad(free_pages=98, running_sequences=1, decode_step_s=0.5)
    second = await read(call)
    assert not second.HasField("info")
    assert (second.load.free_pages, second.load.running_sequences, second.load.decode_step_s) == (98, 1, 0.5)


@pytest.mark.slow
async def test_without_a_change_it_repeats_itself(watched):
    call = watched.watch()
    first, second = await read(call), await read(call)
    assert first.load == second.load


async def test_the_stop_signal_shows_at_once(watched):
    call = watched.watch()
    assert not (await read(call)).load.draining
    watched.draining = True
    assert (await read(call)).load.draining


async def test_one_look_serves_all_and_none_is_taken_when_nobody_watches(watched):
    assert watched.looks == 0
    calls = [watched.watch() for _ in range(20)]
    for call in calls:
        await read(call)
    before = watched.looks
    watched.load = MemberLoad(free_pages=1)
    for call in calls:
        assert (await read(call)).load.free_pages == 1
    assert watched.looks - before <= 5
    assert watched.servicer.watchers == 20
    for call in calls:
        call.cancel()
    for _ in calls:
        await asyncio.wait_for(watched.ends.get(), 10)
    assert watched.servicer.watchers == 0


async def test_watchers_are_bounded(watched):
    calls = [watched.watch() for _ in range(watch.MAX_WATCHERS)]
    for call in calls:
        await read(call)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(watched.watch())
    found = details_from(refused.value)
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
    assert "256" in found.message and found.retry_after_s is not None


async def test_the_end_is_typed(watched):
    call = watched.watch()
    await read(call)
    await watched.servicer.close()
    for one in (call, watched.watch()):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read(one)
        assert details_from(ended.value).reason == "DRAINING"


async def test_a_look_that_fails_is_a_crash(watched):
    call = watched.watch()
    await read(call)
    watched.load = fault = RuntimeError("no load")
    assert await asyncio.wait_for(watched.crashes.get(), 10) is fault
    call.cancel()

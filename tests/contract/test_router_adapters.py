"""Adapters as a router's clients see them: names, members that have them, lost members and routers."""

import asyncio

import grpc
import pytest

from lifecycle.adapters import Adapter
from lifecycle.prefix_keys import adapted_salt, tenant_salt
from tandem.pools.v1 import decode_pb2, grant_pb2
from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, redis_url
from tests.router_world import request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

A, B = {"polite": "aa"}, {"polite": "bb"}
EVERYWHERE = dict.fromkeys(("decode-0", "decode-1", "prefill-0", "prefill-1"), A)
MEANT = grant_pb2.Adapter(name="polite", identity="aa")


async def test_it_goes_to_both_members_into_the_record_and_into_what_one_id_means(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, adapters=EVERYWHERE) as world:
        asked = request("r1", adapter="polite", sampling=pb.SamplingParams(seed=1))
        answer = await world.client.generate(asked)
        assert answer.code is grpc.StatusCode.OK
        (opening,), (prompt,) = world.decode.opens, world.prefill.requests
        assert opening.adapter == prompt.adapter == MEANT
        # Members mix it in themselves; they are told the tenant's.
        assert opening.tenant_salt == tenant_salt("default") != adapted_salt(tenant_salt("default"), Adapter("polite", "aa"))
        assert (await world.client.get("r1")).adapter == "polite"
        assert (await world.client.generate(asked)).events == answer.events
        other = await world.client.generate(request("r1", sampling=pb.SamplingParams(seed=1)))
        assert other.code is grpc.StatusCode.ALREADY_EXISTS
        plain = await world.client.generate(request("r2"))
        assert plain.code is grpc.StatusCode.OK and not world.decode.opens[-1].HasField("adapter")
        assert len(world.decode.opens) == 2
        (model,) = (await world.client.stub.ListModels(pb.ListModelsRequest())).models
        assert list(model.adapters) == ["polite"]
        await world.at_rest()


async def test_an_unknown_one_is_not_found_and_leaves_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, adapters=EVERYWHERE) as world:
        answer = await world.client.generate(request("r1", adapter="rude"))
        assert answer.error is not None
        assert (answer.code, answer.error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")
        assert answer.error.message == "no adapter is called 'rude'; this cell has 'polite'"
        assert not world.decode.opens and await world.client.state("r1") == ""
        await world.at_rest()


async def test_who_asks_again_when_it_is_gone_is_told_how_it_ended(redis_url: str, cell: str) -> None:
    asked = request("r1", adapter="polite", sampling=pb.SamplingParams(seed=1))
    async with router_world(redis_url, cell, adapters=EVERYWHERE) as world:
        answer = await world.client.generate(asked)
    async with router_world(redis_url, cell) as world:
        again = await world.client.generate(asked)
        assert again.code is grpc.StatusCode.OK
        assert again.events[-1].completed.finish_reason == answer.events[-1].completed.finish_reason
        other = await world.client.generate(request("r1", adapter="polite", sampling=pb.SamplingParams(seed=2)))
        assert other.code is grpc.StatusCode.ALREADY_EXISTS
        new = await world.client.generate(request("r2", adapter="polite"))
        assert new.error is not None and new.error.reason == "UNKNOWN_ADAPTER"
        assert not world.decode.opens
        await world.at_rest()


async def test_only_members_that_have_it_are_asked(redis_url: str, cell: str) -> None:
    some = {"decode-1": A, "prefill-1": A}
    async with router_world(redis_url, cell, prefills=2, decodes=2, adapters=some) as world:
        answers = await asyncio.gather(*(world.client.generate(request(f"r{n}", adapter="polite")) for n in range(8)))
        assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
        assert not world.decodes[0].opens and not world.prefills[0].requests
        assert len(world.decodes[1].opens) == len(world.prefills[1].requests) == 8
        await world.at_rest()


async def test_unlike_contents_are_never_combined(redis_url: str, cell: str) -> None:
    """Both pools have the name; a pair with one content serves, and without such a pair the request is refused."""
    async with router_world(redis_url, cell, prefills=2, adapters={"decode-0": A, "prefill-0": B, "prefill-1": A}) as world:
        for number in range(4):
            assert (await world.client.generate(request(f"r{number}", adapter="polite"))).code is grpc.StatusCode.OK
        assert not world.prefills[0].requests and len(world.prefills[1].requests) == 4
        _, faults = await world.client.books()
        assert faults == ["adapter 'polite' is not the same on all members: aa on decode-0, prefill-1; bb on prefill-0"]
    async with router_world(redis_url, cell + "-split", adapters={"decode-0": A, "prefill-0": B}) as world:
        answer = await world.client.generate(request("r1", adapter="polite"))
        assert answer.error is not None and answer.error.reason == "ADAPTER_MISMATCH"
        assert answer.code is grpc.StatusCode.FAILED_PRECONDITION and "decode-0, prefill-0" in answer.error.message
        assert not world.decode.opens and not world.prefill.requests


async def test_an_attempt_that_follows_a_lost_or_refusing_member_has_it_too(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2, adapters=EVERYWHERE) as world:
        for decode in world.decodes:
            decode.script.cut_after, decode.script.cut_code = 1, grpc.StatusCode.UNAVAILABLE
            decode.script.refusals.append(decode_pb2.Refused(reason="unknown_adapter", retryable=True))
        call = world.client.begin(request("r1", adapter="polite"))
        await until(lambda: _opens(world, 3), True)
        for decode in world.decodes:
            decode.script.cut_after = None
        answer = await call
        assert answer.code is grpc.StatusCode.OK, answer.error
        opens = [opening for decode in world.decodes for opening in decode.opens]
        assert len(opens) > 2 and all(opening.adapter == MEANT for opening in opens)
        assert all(prompt.adapter == MEANT for prompt in world.prefill.requests)
        await world.at_rest()


async def _opens(world: object, least: int) -> bool:
    return sum(len(decode.opens) for decode in world.decodes) >= least

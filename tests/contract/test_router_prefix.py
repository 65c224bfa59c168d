"""What members say of their prefix caches, at the router: what it is used for, and that being wrong costs time only."""

import random
from functools import partial

import pytest

from lifecycle.prefix_keys import PrefixKeys, short, tenant_salt
from router.servicer import DEFAULT_TENANT
from tandem.pools.v1 import member_pb2
from tandem.v1 import inference_pb2 as pb
from tests.fake_member import PAGE_TOKENS, FakeMember
from tests.redis_server import cell, redis_url
from tests.router_world import World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

IDENTITY = b"identity of all"
KEYS = PrefixKeys(IDENTITY, PAGE_TOKENS)
#: Twelve pages and four tokens.
PROMPT = "one page of text" * 12 + "tail"
INFO = {"computes_prompts": True, "prefix_identity": IDENTITY}


def known(text: str, tenant: str = DEFAULT_TENANT, pages: int = 99) -> list[int]:
    """What a member tells that has the first pages of a prompt."""
    return [short(key) for key in KEYS.of(tenant_salt(tenant), text.encode())][:pages]


async def tell(world: World, member: FakeMember, stored: list[int], remembered: int | None = None) -> None:
    """A member tells what it has; returns when the router has taken it in."""
    before = hints(world)
    member.prefixes = member_pb2.PrefixNews(stored=stored)
    member.tell()
    await until(partial(settled, world), before + (len(stored) if remembered is None else remembered))


async def settled(world: World) -> int:
    return hints(world)


def hints(world: World) -> int:
    """Hints that the router remembers."""
    return int(sum(shown(world, "tandem_router_prefix_hints").values()))


def shown(world: World, metric: str) -> dict[str, float]:
    """The values of a metric that are not 0, by label."""
    frame = world.routers[0].frame
    assert frame is not None
    rows = [line for line in frame.metrics.text().splitlines() if line.startswith(metric + "{")]
    return {row.split('"')[1]: float(row.rsplit(" ", 1)[1]) for row in rows if not row.endswith(" 0.0")}


async def served(world: World, number: int, tenant: str = "") -> pb.Completed:
    """A request that is served whole."""
    metadata = (("tandem-tenant", tenant),) if tenant else ()
    answer = await world.client.generate(request(f"r{number}", PROMPT), metadata=metadata)
    assert answer.text == "t0 t1 t2 ", answer
    return answer.completed


def placements(world: World) -> dict[str, float]:
    return shown(world, "tandem_router_placements_total")


async def test_what_decode_has_most_of_it_computes_itself(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=4, decode_info=INFO) as world:
        near = world.decodes[2]
        near.script.cached_tokens = 192
        await tell(world, near, known(PROMPT))
        done = await served(world, 1)
        (opening,) = near.opens
        assert not opening.HasField("prefill") and opening.most_computed_tokens == 128
        assert opening.tenant_salt == tenant_salt(DEFAULT_TENANT)
        assert done.usage.cached_prompt_tokens == 192 and placements(world) == {"decode_cached": 1}
        assert not any(prefill.requests for prefill in world.prefills)
        await world.at_rest()


async def test_what_it_lacks_much_of_comes_from_prefill_and_still_goes_to_whoever_has_most(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=4, prefills=3, decode_info=INFO, local_tokens=32) as world:
        await tell(world, world.decodes[2], known(PROMPT, pages=6))
        await tell(world, world.prefills[1], known(PROMPT, pages=11))
        await served(world, 1)
        assert len(world.decodes[2].opens) == len(world.prefills[1].requests) == 1
        assert world.prefills[1].requests[0].tenant_salt == tenant_salt(DEFAULT_TENANT)
        assert placements(world) == {"handed_over": 1}
        await world.at_rest()


async def test_a_lie_costs_a_round_trip_once(redis_url: str, cell: str) -> None:
    """The member says that it has the prompt and has nothing: the prompt is computed by a prefill member, and the lie is not
    believed again."""
    async with router_world(redis_url, cell, decode_info=INFO) as world:
        await tell(world, world.decode, known(PROMPT))
        await served(world, 1)
        assert [opening.HasField("prefill") for opening in world.decode.opens] == [False, True]
        assert placements(world) == {"decode_cached": 1, "prefix_gone": 1, "handed_over": 1}
        await served(world, 2)
        assert len(world.decode.opens) == 3 and world.decode.opens[2].HasField("prefill")
        await world.at_rest()


async def test_rubbish_from_members_changes_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2, prefills=2, decode_info=INFO, prefix_hints=50) as world:
        rng = random.Random(1)
        rubbish = [rng.getrandbits(64) for _ in range(500)]
        for member in (*world.decodes, *world.prefills):
            await tell(world, member, [*rubbish, *known(PROMPT)[::3]], remembered=50)
        for number in range(4):
            await served(world, number)
        assert 0 < hints(world) <= 4 * 50
        await world.at_rest()


async def test_b48_hints_are_for_the_tenant_that_they_are_of(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decode_info=INFO, trust_tenant_header=True) as world:
        world.decode.script.cached_tokens = 192
        await tell(world, world.decode, known(PROMPT, "one"))
        await served(world, 1, "another")
        await served(world, 2, "one")
        assert [opening.HasField("prefill") for opening in world.decode.opens] == [True, False]
        assert world.decode.opens[0].tenant_salt == tenant_salt("another") != world.decode.opens[1].tenant_salt
        await world.at_rest()


async def test_a_member_that_is_gone_has_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decode_info=INFO) as world:
        await tell(world, world.decode, known(PROMPT))
        await world.decode.restart()
        await until(partial(settled, world), 0)
        await world.at_rest()

"""Whose a call at a router is: tokens, tenants that do not see one another, operators, other routers, and limits of tenants."""

import asyncio
import hashlib

import grpc
import grpc.aio
import pytest

from router.router_peers import FORWARDED_KEY, TENANT_KEY
from rpc.status import details_from
from tandem.pools.v1 import member_pb2
from tandem.v1 import inference_pb2 as pb
from tests.fake_member import PAGE_TOKENS
from tests.redis_server import cell, redis_url
from tests.router_world import Client, World, request, router_world

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

CELL_SECRET = "cell-secret-of-at-least-32-characters"
ANN, BOB, OPERATOR = "token-of-ann", "token-of-bob", "token-of-the-operator"
UNAUTHENTICATED, NOT_FOUND = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND


def entry(name: str, token: str, tenant: str, roles: str = "[]") -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[tokens]]\nname = "{name}"\nsha256 = "{digest}"\ntenant = "{tenant}"\nroles = {roles}\n'


@pytest.fixture
def secured(tmp_path):
    """Settings of routers that know two tenants and an operator."""
    (tmp_path / "secret").write_text(CELL_SECRET)
    tokens = entry("ann", ANN, "a") + entry("bob", BOB, "b") + entry("op", OPERATOR, "ops", '["operator"]')
    (tmp_path / "tokens.toml").write_text(tokens)
    files = {"token_file": str(tmp_path / "tokens.toml"), "cell_secret_file": str(tmp_path / "secret")}
    return {**files, "token": CELL_SECRET, "reflection": True}


def as_client(world: World, token: str, router: int = 0) -> Client:
    """Another client of a router."""
    return Client(world.routers[router].frame.address, token)


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    details = details_from(failed.value)
    for secret in (ANN, BOB, OPERATOR, CELL_SECRET):
        assert secret not in str(failed.value)
    return failed.value.code(), details.reason


async def test_without_a_token_nothing_is_said_and_with_a_wrong_one_neither(redis_url, cell, secured):
    async with router_world(redis_url, cell, **secured) as world:
        nobody, wrong = as_client(world, ""), as_client(world, "token-of-nobody")
        for client, reason in ((nobody, "TOKEN_REQUIRED"), (wrong, "INVALID_TOKEN")):
            calls = (
                client.stub.Get(pb.GetRequest(request_id="r1")),
                client.stub.Cancel(pb.CancelRequest(request_id="r1")),
                client.stub.ListModels(pb.ListModelsRequest()),
                client.stub.Generate(request("r1")).read(),
                client.stub.Generate(pb.GenerateRequest()).read(),
                client.stub.Attach(pb.AttachRequest(request_id="r1")).read(),
                client.admin.Check(member_pb2.CheckRequest()),
            )
            for call in calls:
                assert await refusal(call) == (UNAUTHENTICATED, reason)
            assert (await client.raw(b"\xff\xff")).code is UNAUTHENTICATED
            await client.channel.close()
        await world.at_rest()


async def test_a_tenant_sees_and_ends_its_own_requests_alone(redis_url, cell, secured):
    async with router_world(redis_url, cell, routers=2, **secured) as world:
        ann, bob, operator = as_client(world, ANN), as_client(world, BOB, 1), as_client(world, OPERATOR, 1)
        world.decode.script.output.hold()
        running = ann.begin(request("r1"))
        await ann.until_state("r1", "decoding", 30)
        for client in (bob, as_client(world, BOB)):
            assert await refusal(client.stub.Get(pb.GetRequest(request_id="r1"))) == (NOT_FOUND, "UNKNOWN_REQUEST")
            cancel = pb.CancelRequest(request_id="r1")
            assert await refusal(client.stub.Cancel(cancel)) == (NOT_FOUND, "UNKNOWN_REQUEST")
            cancel.choice = 0
            assert await refusal(client.stub.Cancel(cancel)) == (NOT_FOUND, "UNKNOWN_REQUEST")
            assert (await client.attach("r1", 0)).error.reason == "UNKNOWN_REQUEST"
        await bob.channel.close()
        assert (await operator.get("r1")).tenant == "a"
        assert (await operator.attach("r1", 0)).error.reason == "UNKNOWN_REQUEST", "what it says is for its tenant alone"
        assert not running.done()
        await operator.cancel("r1", wait=True)
        assert (await running).code is grpc.StatusCode.CANCELLED
        assert await refusal(as_client(world, BOB).stub.Cancel(pb.CancelRequest(request_id="r1"))) == (
            NOT_FOUND,
            "UNKNOWN_REQUEST",
        )
        await world.at_rest()


async def test_a_cancel_before_the_request_ends_the_own_tenants_request_alone(redis_url, cell, secured):
    async with router_world(redis_url, cell, routers=2, **secured) as world:
        ann, bob = as_client(world, ANN), as_client(world, BOB, 1)
        await bob.cancel("r1")
        assert (await ann.generate(request("r1"))).code is grpc.StatusCode.OK
        await bob.cancel("r2")
        await ann.cancel("r2")
        assert (await ann.generate(request("r2"))).code is grpc.StatusCode.CANCELLED
        await as_client(world, OPERATOR).cancel("r3")
        assert (await ann.generate(request("r3"))).code is grpc.StatusCode.CANCELLED
        await world.at_rest()


async def test_a_stream_is_taken_up_at_another_router_by_its_tenant(redis_url, cell, secured):
    async with router_world(redis_url, cell, routers=2, **secured) as world:
        ann = as_client(world, ANN)
        world.decode.script.output.hold()
        running = ann.begin(request("r1", on_disconnect=pb.ON_DISCONNECT_DETACH))
        await ann.until_state("r1", "decoding", 30)
        elsewhere = asyncio.create_task(as_client(world, ANN, 1).attach("r1", 0))
        world.decode.script.output.release()
        assert (await elsewhere).text == (await running).text != ""
        await world.at_rest()


async def test_what_a_client_says_of_tenants_and_routers_is_not_believed(redis_url, cell, secured):
    claims = ((TENANT_KEY, "b"), (FORWARDED_KEY, "router-1"))
    async with router_world(redis_url, cell, trust_tenant_header=True, **secured) as world:
        ann = as_client(world, ANN)
        assert (await ann.generate(request("r1"), metadata=claims)).code is grpc.StatusCode.OK
        assert (await ann.get("r1")).tenant == "a"
        assert (await world.client.attach("r1", 0, metadata=((TENANT_KEY, "a"),))).code is grpc.StatusCode.OK
        assert (await world.client.attach("r1", 0, metadata=((TENANT_KEY, "b"),))).error.reason == "UNKNOWN_REQUEST"


async def test_only_operators_and_processes_of_the_cell_look_into_a_router(redis_url, cell, secured):
    async with router_world(redis_url, cell, **secured) as world:
        check = member_pb2.CheckRequest()
        denied = grpc.StatusCode.PERMISSION_DENIED, "OPERATOR_ONLY"
        assert await refusal(as_client(world, ANN).admin.Check(check)) == denied
        assert not (await as_client(world, OPERATOR).admin.Check(check)).faults
        assert not (await world.client.admin.Check(check)).faults


async def test_limits_of_a_tenant_say_which_and_how_long(redis_url, cell, secured, tmp_path):
    limits = "[tenants.a]\nrequests_per_s = 0.001\nrequest_burst = 2\n[tenants.b]\nconcurrent_requests = 1\n"
    path = tmp_path / "tokens.toml"
    path.write_text(path.read_text() + limits)
    async with router_world(redis_url, cell, tenant_tokens_per_s=0.001, tenant_token_burst=40, **secured) as world:
        ann, bob, operator = as_client(world, ANN), as_client(world, BOB), as_client(world, OPERATOR)
        for number in range(2):
            assert (await ann.generate(request(f"a{number}", "x"))).code is grpc.StatusCode.OK
        error = (await ann.generate(request("a2"))).error
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_REQUEST_RATE")
        assert error.quotas[0].subject == "tenant:a" and error.quotas[0].limit_id == "tenant_requests_per_s"
        assert 500 < error.retry_after_s <= 1000
        assert (await ann.generate(request("a1", "x"))).code is grpc.StatusCode.OK, "a known one is not new"

        world.decode.script.output.hold()
        running = bob.begin(request("b0"))
        await bob.until_state("b0", "decoding", 30)
        error = (await bob.generate(request("b1"))).error
        assert (error.reason, error.quotas[0].value) == ("TENANT_CONCURRENCY", 1) and error.retry_after_s > 0
        world.decode.script.output.release()
        assert (await running).code is grpc.StatusCode.OK

        assert (await operator.generate(request("o0", "x" * 39))).code is grpc.StatusCode.OK
        error = (await operator.generate(request("o1", "x" * 39))).error
        assert error.reason == "TENANT_TOKEN_RATE" and error.retry_after_s > 1000
        await world.at_rest()
        page = world.routers[0].frame.metrics.text()
        for cause in ("tenant_request_rate", "tenant_concurrency", "tenant_token_rate"):
            assert f'tandem_router_refusals_total{{cause="{cause}"}} 1.0' in page


async def test_a_tenants_own_budgets_count_instead_of_everybodys(redis_url, cell, secured, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(path.read_text() + "[tenants.a]\npages = 2\n")
    async with router_world(redis_url, cell, tenant_pages=1, **secured) as world:
        ann, bob = as_client(world, ANN), as_client(world, BOB)
        error = (await bob.generate(request("b0", max_output_tokens=PAGE_TOKENS))).error
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "a tenant has 1" in error.message
        assert (await ann.generate(request("a0", max_output_tokens=PAGE_TOKENS))).code is grpc.StatusCode.OK

        world.decode.script.output.hold()
        running = [client.begin(request(name)) for client, name in ((bob, "b1"), (ann, "a1"), (ann, "a2"))]
        for client, name in ((bob, "b1"), (ann, "a1"), (ann, "a2")):
            await client.until_state(name, "decoding", 30)
        waiting = [client.begin(request(name)) for client, name in ((bob, "b2"), (ann, "a3"))]
        for client, name in ((bob, "b2"), (ann, "a3")):
            await client.until_state(name, "queued", 30)
        held = {f"pages:tenant:{tenant}": pages for tenant, pages in (("a", 2), ("b", 1))}
        books = (await world.client.books())[0]
        assert {name: books.get(f"store:{name}") for name in held} == held
        world.decode.script.output.release()
        assert {(await one).code for one in (*running, *waiting)} == {grpc.StatusCode.OK}
        await world.at_rest()


async def test_tokens_are_read_again(redis_url, cell, secured, tmp_path):
    async with router_world(redis_url, cell, **secured) as world:
        new = as_client(world, "token-of-cleo")
        assert (await refusal(new.stub.ListModels(pb.ListModelsRequest())))[0] is UNAUTHENTICATED
        path = tmp_path / "tokens.toml"
        path.write_text(path.read_text() + entry("cleo", "token-of-cleo", "c"))
        async with asyncio.timeout(30):
            while True:
                try:
                    await new.stub.ListModels(pb.ListModelsRequest())
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
                else:
                    break

"""Processes with TLS and proofs of their cell: what is open to whom, probes, and channels whose certificates are replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc.admin import Books
from rpc.cell_identity import CellIdentity, bearer
from rpc.dialling import dialler
from rpc.security_settings import SecuritySettings
from rpc.server_settings import ServerSettings
from rpc.serving import Process
from rpc.status import details_from
from rpc.watched_files import BadFile
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tests.certificates import Authority
from tests.waiting import until

pytestmark = pytest.mark.slow

SECRET = "s" * 40


class Member(member_pb2_grpc.MemberServiceServicer):
    """An application with a service for routers, that tells whose calls came."""

    service_names = ("tandem.pools.v1.MemberService",)

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.finish = asyncio.Event()

    def add_to(self, server):
        member_pb2_grpc.add_MemberServiceServicer_to_server(self, server)

    async def Watch(self, request, context):  # noqa: N802
        self.peers.append(context.auth_context().get("x509_common_name", [b""])[0].decode())
        await context.write(member_pb2.WatchResponse(load=member_pb2.MemberLoad(free_pages=1)))
        await self.finish.wait()
        await context.write(member_pb2.WatchResponse(load=member_pb2.MemberLoad(free_pages=2)))

    async def start(self):
        pass

    def stalled(self, now):
        return False

    async def check(self):
        return Books({"pages": 1})

    def begin_drain(self):
        pass

    async def drained(self):
        pass

    async def stop(self):
        self.finish.set()


@asynccontextmanager
async def serving(**changes: object) -> AsyncIterator[tuple[Process, Member]]:
    settings = ServerSettings(listen="127.0.0.1:0", metrics_port=None, drain_settle_s=0.0, reflection=True, **changes)
    member = Member()
    process = Process(lambda frame: member, settings, "prefill")
    try:
        await process.open()
        yield process, member
    finally:
        await process.close()


def channel_of(process: Process, **settings: object) -> grpc.aio.Channel:
    """A channel as a process of these settings opens it."""
    own = SecuritySettings(**settings)
    return dialler(own, CellIdentity(own))(process.frame.address)


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), details_from(failed.value).reason


def first_news(channel: grpc.aio.Channel):
    return member_pb2_grpc.MemberServiceStub(channel).Watch(member_pb2.WatchRequest(), timeout=60).read()


def recount(channel: grpc.aio.Channel):
    return member_pb2_grpc.AdminServiceStub(channel).Check(member_pb2.CheckRequest(), timeout=60)


def health(channel: grpc.aio.Channel):
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)


async def reflect(channel: grpc.aio.Channel):
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=60)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    call.cancel()
    return [one.name for one in answer.list_services_response.service]


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"# of the cell\n{SECRET}\n")
    return path


async def test_a_secret_opens_services_of_the_pools_and_nothing_else_does(secret_file):
    async with serving(cell_secret_file=str(secret_file)) as (process, _):
        async with channel_of(process, cell_secret_file=str(secret_file)) as inside:
            assert (await first_news(inside)).load.free_pages == 1
            assert dict((await recount(inside)).books) == {"pages": 1}
            assert "tandem.pools.v1.MemberService" in await reflect(inside)
        async with channel_of(process) as outside:
            for call in (first_news(outside), recount(outside), reflect(outside)):
                assert await refusal(call) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
            assert (await health(outside)).status == health_pb2.HealthCheckResponse.SERVING
            wrong = (("authorization", "Bearer " + "t" * 40),)
            stub = member_pb2_grpc.AdminServiceStub(outside)
            code, _ = await refusal(stub.Check(member_pb2.CheckRequest(), metadata=wrong, timeout=60))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            unreadable = outside.unary_unary("/tandem.pools.v1.AdminService/Check")(b"\xff\xff", timeout=60)
            assert (await refusal(unreadable))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_secret_is_replaced_while_both_are_taken(secret_file, tmp_path):
    async with serving(cell_secret_file=str(secret_file)) as (process, _):
        new, mine = "n" * 40, tmp_path / "mine"
        mine.write_text(new)
        async with channel_of(process, cell_secret_file=str(mine)) as inside:
            assert (await refusal(recount(inside)))[0] is grpc.StatusCode.UNAUTHENTICATED
            secret_file.write_text(f"{SECRET}\n{new}\n")

            async def taken() -> bool:
                try:
                    return bool(await recount(inside))
                except grpc.aio.AioRpcError:
                    return False

            await until(taken, 30, "the new secret")


async def test_only_names_of_the_cell_may_call_members(tmp_path):
    authority = Authority(tmp_path)
    server = authority.sign("server", uri="spiffe://example/tandem/prefill/0")
    router = authority.sign("router", uri="spiffe://example/tandem/router/0")
    client = authority.sign("client", uri="spiffe://example/clients/7")
    mine = {"tls_cert_file": server.cert, "tls_key_file": server.key, "tls_client_ca_file": authority.path}
    health_port = {"health_listen": "127.0.0.1:0"}
    async with serving(**mine, **health_port, internal_identities=("spiffe://example/tandem/*",)) as (process, member):

        def of(pair):
            own = {"tls_client_cert_file": pair.cert, "tls_client_key_file": pair.key} if pair else {}
            return channel_of(process, tls_ca_file=authority.path, **own)

        async with of(router) as inside:
            assert (await first_news(inside)).load.free_pages == 1
            assert member.peers == ["router"]
        async with of(client) as outside:
            for call in (first_news(outside), recount(outside), reflect(outside)):
                assert await refusal(call) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_OF_THE_CELL")
            assert (await health(outside)).status == health_pb2.HealthCheckResponse.SERVING
        for unknown in (of(None), channel_of(process)):
            async with unknown:
                assert (await refusal(health(unknown)))[0] is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(process.health_address) as probe:
            assert (await health(probe)).status == health_pb2.HealthCheckResponse.SERVING
            assert (await refusal(recount(probe)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_channel_takes_its_new_certificate_and_its_old_calls_live_on(tmp_path):
    authority = Authority(tmp_path)
    server, router = authority.sign("server"), authority.sign("old", file="router")
    mine = {"tls_cert_file": server.cert, "tls_key_file": server.key, "tls_client_ca_file": authority.path}
    async with serving(**mine, internal_identities=("old", "new")) as (process, member):
        own = {"tls_client_cert_file": router.cert, "tls_client_key_file": router.key}
        async with channel_of(process, tls_ca_file=authority.path, tls_server_name="server", **own) as channel:
            stub = member_pb2_grpc.MemberServiceStub(channel)
            watch = stub.Watch(member_pb2.WatchRequest(), timeout=60)
            assert (await watch.read()).load.free_pages == 1
            authority.sign("new", file="router")

            async def renewed() -> bool:
                call = stub.Watch(member_pb2.WatchRequest(), timeout=60)
                await call.read()
                call.cancel()
                return member.peers[-1] == "new"

            await until(renewed, 30, "the new certificate")
            member.finish.set()
            assert (await watch.read()).load.free_pages == 2


async def test_a_process_with_half_a_configuration_does_not_start(tmp_path, secret_file):
    pair = Authority(tmp_path).sign("server")
    with pytest.raises(ValueError, match="tls_key_file is required, because tls_cert_file is set"):
        ServerSettings(tls_cert_file=pair.cert)
    with pytest.raises(ValueError, match="tls_client_ca_file is required, because internal_identities is set"):
        ServerSettings(internal_identities=("a",))
    with pytest.raises(BadFile, match="tls_cert_file: /nowhere cannot be read"):
        async with serving(tls_cert_file="/nowhere", tls_key_file=pair.key):
            pass
    secret_file.write_text("short")
    with pytest.raises(BadFile, match=r"cell_secret_file: secret 1 must have at least 32 characters.*it has 5"):
        async with serving(cell_secret_file=str(secret_file)):
            pass


def test_credentials_that_are_no_single_bearer_token_are_none():
    assert bearer((("authorization", "Bearer  abc "),)) == "abc"
    assert bearer((("authorization", "bearer abc"),)) == "abc"
    for bad in ("Basic abc", "Bearer", "abc", ""):
        assert bearer((("authorization", bad),)) == ""
    assert bearer((("authorization", "Bearer a"), ("authorization", "Bearer b"))) == ""
    assert bearer(None) == ""

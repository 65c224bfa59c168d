"""The HTTP door with TLS, client certificates and tokens: real handshakes at a router over fakes."""

import asyncio
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterSettings
from rpc.tls import ClientTls
from rpc.watched_files import BadFile
from tests.certificates import Authority, Pair
from tests.contract.test_router_access import ANN, BOB, NOT_FOUND, secured
from tests.http_world import CHAT, COMPLETIONS, TIMEOUT_S, base_of, chat, completion, http_world, streamed
from tests.redis_server import cell, redis_url
from tests.router_world import Client, World, router_world, until

__all__ = ["cell", "redis_url", "secured"]

pytestmark = pytest.mark.slow


@dataclass
class Certified:
    """An authority, and settings of a router that has a certificate of it, in the files `server`."""

    authority: Authority
    settings: dict[str, Any]

    def trust(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Of an HTTP client; `pair`: the certificate that it shows."""
        context = ssl.create_default_context(cafile=self.authority.path)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    authority = Authority(tmp_path)
    server = authority.sign("first", file="server")
    files = {"tls_cert_file": server.cert, "tls_key_file": server.key}
    return Certified(authority, {**files, "credentials": ClientTls(authority.path).credentials(), "ui": True})


def bearing(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def address_of(http: httpx.AsyncClient) -> tuple[str, int]:
    assert http.base_url.port is not None
    return http.base_url.host, http.base_url.port


async def shown(http: httpx.AsyncClient, trust: ssl.SSLContext) -> str:
    """The name on the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection(*address_of(http), ssl=trust)
    subject = writer.get_extra_info("peercert")["subject"]
    writer.transport.abort()
    return dict(entry[0] for entry in subject)["commonName"]


async def test_only_tls_is_spoken_and_only_tokens_are_answered(
    redis_url: str, cell: str, certified: Certified, secured: dict[str, Any]
) -> None:
    settings = {**certified.settings, **secured}
    async with http_world(redis_url, cell, certified.trust(), **settings) as (world, http):
        assert str(http.base_url).startswith("https://")
        assert (await http.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.base_url.port}", timeout=TIMEOUT_S) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/health")
        async with httpx.AsyncClient(base_url=http.base_url, timeout=TIMEOUT_S) as distrusting:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await distrusting.get("/health")
        for headers, code in (({}, "TOKEN_REQUIRED"), (bearing("token-of-nobody"), "INVALID_TOKEN")):
            for answer in (
                await http.post(COMPLETIONS, json=completion(), headers=headers),
                await http.post(COMPLETIONS, json=completion(stream=True), headers=headers),
                await http.post(CHAT, json=chat(), headers=headers),
                await http.get("/v1/models", headers=headers),
                await http.get("/v1/models/fake", headers=headers),
                await http.get("/ui/api/cell", headers=headers),
                await http.get("/ui/api/requests/r1", headers=headers),
                await http.post("/ui/api/requests/r1/cancel", headers=headers),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "token-of-nobody" not in answer.text
        assert not world.decode.opens
        answer = await streamed(http, CHAT, chat(), headers=bearing(ANN))
        assert (answer.status, answer.texts()) == (200, {0: "t0 t1 t2 "})
        await world.at_rest()


async def test_a_tenants_requests_are_not_there_for_others(
    redis_url: str, cell: str, certified: Certified, secured: dict[str, Any]
) -> None:
    settings = {**certified.settings, **secured, "trust_tenant_header": True}
    async with http_world(redis_url, cell, certified.trust(), **settings) as (world, http):
        ann, bob = bearing(ANN), bearing(BOB)
        world.decode.script.output.hold()
        named = {"x-request-id": "r1", "tandem-tenant": "b"}
        running = asyncio.create_task(http.post(COMPLETIONS, json=completion(), headers={**ann, **named}))
        await world.client.until_state("r1", "decoding", TIMEOUT_S)
        record = (await http.get("/ui/api/requests/r1", headers=ann)).json()
        assert (record["tenant"], record["state"]) == ("a", "REQUEST_STATE_DECODING"), "whose it is the token says"
        for answer in (
            await http.get("/ui/api/requests/r1", headers=bob),
            await http.post("/ui/api/requests/r1/cancel", headers=bob),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "UNKNOWN_REQUEST")
        # The same id with the same body is the same request, for its own tenant alone.
        theirs = await http.post(COMPLETIONS, json=completion(), headers={**bob, **named})
        assert theirs.status_code == 422 and "t0" not in theirs.text
        over_grpc = Client(world.routers[0].frame.address, BOB, certified.settings["credentials"])  # type: ignore[union-attr]
        assert (await over_grpc.attach("r1", 0)).code is NOT_FOUND
        await over_grpc.channel.close()
        assert not running.done()
        world.decode.script.output.release()
        assert (await running).json()["choices"][0]["text"] == "t0 t1 t2 "
        assert (await http.post(COMPLETIONS, json=completion(), headers={**ann, **named})).json()["choices"][0]["text"]
        assert len(world.decode.opens) == 1
        await world.at_rest()


async def test_a_new_certificate_is_shown_to_new_connections_and_streams_run_on(
    redis_url: str, cell: str, certified: Certified
) -> None:
    async with http_world(redis_url, cell, certified.trust(), **certified.settings) as (world, http):
        world.decode.script.output.hold()
        running = asyncio.create_task(streamed(http, COMPLETIONS, completion()))
        await until(lambda: _count(world.decode.seats), 1, TIMEOUT_S)
        assert await shown(http, certified.trust()) == "first"
        certified.authority.sign("second", file="server")
        await until(lambda: shown(http, certified.trust()), "second", TIMEOUT_S)
        world.decode.script.output.release()
        assert (await running).texts() == {0: "t0 t1 t2 "}
        await world.at_rest()


async def test_with_a_client_authority_only_its_clients_get_in_and_need_their_tokens_too(
    redis_url: str, cell: str, certified: Certified, secured: dict[str, Any], tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    pair, stranger = certified.authority.sign("member"), other.sign("stranger")
    mutual = {
        "tls_client_ca_file": certified.authority.path,
        "internal_identities": ("member",),
        "credentials": ClientTls(certified.authority.path, pair.cert, pair.key).credentials(),
        "token": "",
    }
    async with router_world(redis_url, cell, http_listen="127.0.0.1:0", **{**certified.settings, **secured, **mutual}) as world:
        for refused in (None, stranger):
            async with httpx.AsyncClient(base_url=base_of(world), verify=certified.trust(refused), timeout=TIMEOUT_S) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/health")
        async with httpx.AsyncClient(base_url=base_of(world), verify=certified.trust(pair), timeout=TIMEOUT_S) as http:
            assert (await http.get("/health")).status_code == 200
            # Of gRPC's calls this certificate is proof enough; over HTTP a token says whose a call is.
            assert (await http.get("/v1/models")).status_code == 401
            answer = await http.post(COMPLETIONS, json=completion(), headers=bearing(ANN))
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "t0 t1 t2 ")
        await world.at_rest()


async def test_an_authority_that_is_replaced_lets_its_clients_in_no_more(
    redis_url: str, cell: str, certified: Certified, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    old, new = certified.authority.sign("old"), other.sign("new")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(certified.authority.path, trusted)
    mine = ClientTls(certified.authority.path, old.cert, old.key).credentials()
    settings = {**certified.settings, "tls_client_ca_file": str(trusted), "credentials": mine}

    async def let_in(world: World, pair: Pair) -> bool:
        async with httpx.AsyncClient(base_url=base_of(world), verify=certified.trust(pair), timeout=TIMEOUT_S) as http:
            try:
                return (await http.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

    async with router_world(redis_url, cell, http_listen="127.0.0.1:0", **settings) as world:
        assert await let_in(world, old) and not await let_in(world, new)
        shutil.copy(other.path, trusted)
        await until(lambda: let_in(world, new), True, TIMEOUT_S)
        assert not await let_in(world, old)


async def test_a_handshake_that_does_not_come_is_not_waited_for(redis_url: str, cell: str, certified: Certified) -> None:
    async with http_world(redis_url, cell, certified.trust(), http_read_s=0.5, **certified.settings) as (_, http):
        reader, writer = await asyncio.open_connection(*address_of(http))
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()
        assert (await http.get("/health")).status_code == 200


async def test_half_a_configuration_is_no_start(redis_url: str, cell: str, certified: Certified) -> None:
    needed = {"redis_url": "redis://x", "decode": ("a:1",), "prefill": ("none",), "http_listen": "127.0.0.1:0"}
    with pytest.raises(ValueError, match="tls_key_file is required, because tls_cert_file is set"):
        RouterSettings(**needed, tls_cert_file="cert.pem")
    with pytest.raises(ValueError, match="tls_cert_file is required, because tls_client_ca_file is set"):
        RouterSettings(**needed, tls_client_ca_file="ca.pem")
    another = {**certified.settings, "tls_key_file": certified.authority.sign("another").key, "http_listen": "127.0.0.1:0"}
    with pytest.raises(BadFile, match="tls_cert_file, tls_key_file: the key does not belong to the certificate"):
        async with router_world(redis_url, cell, **another):
            pass


async def _count(things: Any) -> int:
    return len(things)

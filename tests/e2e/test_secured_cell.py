"""A cell of real processes with TLS and certificates on every hop and tokens for clients: requests live as ever, strangers get
nothing, and nothing that was said is found in logs, spans or the store."""

import hashlib
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from rpc.cell_identity import CellIdentity
from rpc.dialling import dialler
from rpc.security_settings import SecuritySettings
from tandem.pools.v1 import decode_pb2_grpc, member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from tandem_cli.client import connect
from tandem_cli.trust import Trust
from tests.certificates import Authority
from tests.e2e.cells import fresh_id, held, read
from tests.e2e.conftest import cell_of
from tests.otlp_collector import OtlpCollector, collecting
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = {"ann": "token-of-ann", "bob": "token-of-bob"}
PLENTY_S = 120.0
MARKER = "zebrafinch quixotry"


@dataclass(frozen=True, slots=True)
class Secured:
    """The cell, what its processes and its clients show, and where its news go."""

    cell: Cell
    inside: SecuritySettings
    outside: Trust
    collector: OtlpCollector

    @asynccontextmanager
    async def client(self, who: str, router: int = 0) -> AsyncIterator[pb_grpc.InferenceServiceStub]:
        trust = Trust(
            ca_file=self.outside.ca_file,
            cert_file=self.outside.cert_file,
            key_file=self.outside.key_file,
            name=self.outside.name,
            token=TOKENS.get(who, who),
        )
        async with connect(self.cell.routers[router].address, trust) as stub:
            yield stub

    async def at_rest(self) -> None:
        """Every process, asked as one of the cell, holds nothing."""
        dial = dialler(self.inside, CellIdentity(self.inside))
        for child in (*self.cell.routers, *self.cell.prefill, *self.cell.decode):
            async with dial(child.address) as channel:
                stub = member_pb2_grpc.AdminServiceStub(channel)

                async def nothing_held(stub: member_pb2_grpc.AdminServiceStub = stub) -> bool:
                    answer = await stub.Check(member_pb2.CheckRequest(), timeout=PLENTY_S)
                    return not held(answer) and not answer.faults

                await until(nothing_held, PLENTY_S, f"{child.name} is at rest")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    process, client = authority.sign("cell"), authority.sign("client")
    tokens = "".join(
        f'[[tokens]]\nname = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\ntenant = "{name}"\n'
        for name, token in TOKENS.items()
    )
    (folder / "tokens.toml").write_text(tokens)
    flags = {
        "tls-cert-file": process.cert,
        "tls-key-file": process.key,
        "tls-client-ca-file": authority.path,
        "tls-ca-file": authority.path,
        "tls-server-name": "cell",
        "internal-identities": "cell",
        "health-listen": "127.0.0.1:0",
    }
    extra = [(role, f"--{name}={value}") for role in ("router", "prefill", "decode") for name, value in flags.items()]
    extra.append(("router", f"--token-file={folder / 'tokens.toml'}"))
    inside = SecuritySettings(
        tls_ca_file=authority.path, tls_client_cert_file=process.cert, tls_client_key_file=process.key, tls_server_name="cell"
    )
    outside = Trust(ca_file=authority.path, cert_file=client.cert, key_file=client.key, name="cell")
    with pytest.MonkeyPatch.context() as environment, collecting() as collector:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        options = {
            "routers": 2,
            "http": "127.0.0.1:0",
            "log_level": "debug",
            "otlp_endpoint": collector.endpoint,
            "kv_tokens": 4096,
        }
        with cell_of(extra=extra, **options) as cell:
            yield Secured(cell, inside, outside, collector)


def said(text: str, **changes: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=fresh_id("secured"),
        text=text,
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopParams(ignore_eos=True),
        **{"max_output_tokens": 24, **changes},
    )


async def test_a_request_is_handed_over_taken_up_elsewhere_and_cancelled(secured: Secured) -> None:
    async with secured.client("ann") as ann, secured.client("ann", 1) as ann_elsewhere, secured.client("bob", 1) as bob:
        request = said("The capital of France is", on_disconnect=pb.ON_DISCONNECT_DETACH)
        answer = await read(ann.Generate(request, timeout=PLENTY_S))
        assert answer.reason == "max_output_tokens" and answer.text
        record = (await ann_elsewhere.Get(pb.GetRequest(request_id=request.request_id), timeout=PLENTY_S)).record
        assert (record.tenant, record.prefill_member, record.decode_member) == ("ann", "prefill-0", "decode-0")
        again = ann_elsewhere.Attach(pb.AttachRequest(request_id=request.request_id), timeout=PLENTY_S)
        assert (await read(again)).text == answer.text
        theirs = bob.Attach(pb.AttachRequest(request_id=request.request_id), timeout=PLENTY_S)
        assert (await read(theirs)).status is grpc.StatusCode.NOT_FOUND

        long = said("A long story:", max_output_tokens=900)
        call = ann.Generate(long, timeout=PLENTY_S)
        begun = await read(call, up_to="delta")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bob.Cancel(pb.CancelRequest(request_id=long.request_id), timeout=PLENTY_S)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await ann_elsewhere.Cancel(pb.CancelRequest(request_id=long.request_id, wait=True), timeout=PLENTY_S)
        assert (await read(call, begun)).reason == "cancelled"
    await secured.at_rest()


async def test_openais_client_has_its_request_handed_over_too(secured: Secured) -> None:
    trust = ssl.create_default_context(cafile=secured.outside.ca_file)
    trust.load_cert_chain(secured.outside.cert_file, secured.outside.key_file)
    assert secured.cell.http_url.startswith("https://")
    base = f"{secured.cell.http_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base, api_key=TOKENS["ann"], http_client=httpx.AsyncClient(verify=trust), timeout=PLENTY_S
    ) as ann:
        request_id = fresh_id("secured")
        answer = await ann.completions.create(
            model="", prompt="The capital of France is", max_tokens=8, stream=True, extra_headers={"x-request-id": request_id}
        )
        assert "".join([chunk.choices[0].text async for chunk in answer])
        with pytest.raises(openai.AuthenticationError):
            await ann.with_options(api_key="token-of-nobody").models.list()
    async with secured.client("ann", 1) as elsewhere:
        record = (await elsewhere.Get(pb.GetRequest(request_id=request_id), timeout=PLENTY_S)).record
    assert (record.tenant, record.decode_member) == ("ann", "decode-0")
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=secured.outside.ca_file)) as uncertified:
        with pytest.raises(httpx.TransportError):
            await uncertified.get(f"{base}/models")
    await secured.at_rest()


async def test_strangers_and_clients_are_kept_out(secured: Secured) -> None:
    async with secured.client("token-of-nobody") as nobody:
        answer = await read(nobody.Generate(said("x"), timeout=PLENTY_S))
        assert (answer.status, answer.error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_TOKEN")
    for address in (child.address for child in (*secured.cell.routers, *secured.cell.prefill, *secured.cell.decode)):
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await member_pb2_grpc.AdminServiceStub(plain).Check(member_pb2.CheckRequest(), timeout=PLENTY_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    # A client has a certificate of the same authority, and is no process of the cell for all that.
    as_client = SecuritySettings(
        tls_ca_file=secured.outside.ca_file,
        tls_client_cert_file=secured.outside.cert_file,
        tls_client_key_file=secured.outside.key_file,
        tls_server_name="cell",
    )
    async with dialler(as_client, CellIdentity(as_client))(secured.cell.decode[0].address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(timeout=PLENTY_S)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    for child in secured.cell.processes:
        if health := child.ready.get("health_address"):
            async with grpc.aio.insecure_channel(health) as probe:
                answer = await health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest(), timeout=PLENTY_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_was_said_is_in_no_log_no_span_and_not_in_the_store(secured: Secured) -> None:
    async with secured.client("ann") as ann:
        asked = said(f"{MARKER} {MARKER}")
        answer = await read(ann.Generate(asked, timeout=PLENTY_S))
        final = await read(ann.Generate(said(MARKER, output_mode=pb.OUTPUT_MODE_FINAL_ONLY), timeout=PLENTY_S))
        bad = await read(ann.Generate(said(MARKER, model=f"no {MARKER}", max_output_tokens=0), timeout=PLENTY_S))
    assert final.text and bad.status is not grpc.StatusCode.OK

    async def told() -> bool:
        return any(span.attributes.get("tandem.request.id") == asked.request_id for span in secured.collector.spans)

    await until(told, PLENTY_S, "the spans arrive")
    secrets = [MARKER.encode(), *(token.encode() for token in TOKENS.values())]
    # What was generated, in pieces that would be found wherever a whole of it stood.
    secrets += [piece.encode() for piece in re.findall(r"[^\W\d_]{4,} [^\W\d_]{4,} [^\W\d_]{4,}", answer.text)]
    logs = {child.log.name: child.log.read_bytes() for child in secured.cell.processes}
    assert sum(map(len, logs.values())) > 1000, "the logs tell much"
    spans = repr(secured.collector.spans).encode()
    stored = await everything(str(secured.cell.store.ready["url"]))
    assert asked.request_id.encode() in stored
    for secret in secrets:
        assert not [name for name, log in logs.items() if secret in log], secret
        assert secret not in spans and secret not in stored, secret
    folders = [Path(child.log).parent for child in secured.cell.processes]
    assert not [path for path in folders[0].rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]


async def everything(url: str) -> bytes:
    """All keys and values of a store."""
    found: list[bytes] = []
    async with Redis.from_url(url) as store:
        async for key in store.scan_iter(count=1000):
            kind = await store.type(key)
            value = {
                b"hash": store.hgetall,
                b"set": store.smembers,
                b"string": store.get,
                b"zset": lambda name: store.zrange(name, 0, -1, withscores=True),
                b"list": lambda name: store.lrange(name, 0, -1),
            }[kind](key)
            found += [key, repr(await value).encode()]
    return b"\n".join(found)

"""Routers over fake members and a real store, in this process, and what their tests ask of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from router.config import RouterSettings
from router.redis_link import Observe, RedisLink, RedisSettings
from router.redis_store import RedisStore
from router.request import ServedModel
from router.service import LoadedModel, Outside, Router
from router.store import StoreUnavailable
from rpc.channels import internal_client_options
from rpc.dialling import RenewedChannel
from rpc.serving import Process
from rpc.status import ErrorDetails, details_from
from tandem.pools.v1 import member_pb2, member_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc
from tests.fake_member import Gate
from tests.fake_members import SNAPSHOT, FakeDecode, FakePrefill, fake_pools
from text.chat_template import ChatTemplate

MODEL = ServedModel("fake", SNAPSHOT, 512, 300)
TEMPLATE = "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"


class ByteTokenizer:
    """One token a byte."""

    chat = ChatTemplate(TEMPLATE, {})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_plain = encode


@dataclass
class Answer:
    """What a Generate call brought."""

    events: list[pb.GenerateResponse] = field(default_factory=list)
    error: ErrorDetails | None = None

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self.error is None else self.error.code

    @property
    def text(self) -> str:
        return "".join(event.delta.text for event in self.events)

    @property
    def completed(self) -> pb.Completed:
        last = self.events[-1]
        assert last.WhichOneof("event") == "completed", last
        return last.completed

    def check_order(self) -> None:
        """Numbers rise by one from 0; Started only first; exactly one Completed, last."""
        kinds = [event.WhichOneof("event") for event in self.events]
        assert [event.sequence_no for event in self.events] == list(range(len(self.events))), self.events
        assert kinds.count("completed") == 1 and kinds[-1] == "completed", kinds
        assert "started" not in kinds[1:], kinds


class Client:
    """A client of one router; `token`: what it shows there. `credentials`: those of a channel with TLS."""

    def __init__(self, address: str, token: str = "", credentials: Any = None) -> None:
        # Small windows, so that a test that does not read is felt at the router.
        options = internal_client_options()
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=options)
        if token:
            plain, shown = self.channel, (("authorization", f"Bearer {token}"),)
            self.channel = RenewedChannel(lambda credentials: plain, lambda: None, lambda: shown)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = member_pb2_grpc.AdminServiceStub(self.channel)

    def begin(self, request: pb.GenerateRequest, **call: Any) -> "asyncio.Task[Answer]":
        """Starts a request; the task reads it to its end."""
        return asyncio.create_task(self.generate(request, **call))

    async def generate(self, request: pb.GenerateRequest, **call: Any) -> Answer:
        return await self._read(self.stub.Generate(request, **call))

    async def attach(self, request_id: str, next_no: int, **call: Any) -> Answer:
        """The rest of a request's stream, from an event on."""
        return await self._read(self.stub.Attach(pb.AttachRequest(request_id=request_id, next_sequence_no=next_no), **call))

    async def _read(self, events: Any) -> Answer:
        answer = Answer()
        try:
            async for event in events:
                answer.events.append(event)
        except grpc.aio.AioRpcError as error:
            answer.error = details_from(error)
        return answer

    async def raw(self, data: bytes) -> ErrorDetails:
        """The error that these bytes, sent to Generate, are answered with."""
        call = self.channel.unary_stream("/tandem.v1.InferenceService/Generate")(data)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return details_from(error)
        raise AssertionError("no error")

    async def cancel(self, request_id: str, *, wait: bool = False, reason: str = "") -> pb.CancelResponse:
        return await self.stub.Cancel(pb.CancelRequest(request_id=request_id, wait=wait, reason=reason))

    async def get(self, request_id: str) -> pb.RequestRecord:
        return (await self.stub.Get(pb.GetRequest(request_id=request_id))).record

    async def state(self, request_id: str) -> str:
        """Name of the state, in lower case; empty when there is no record."""
        try:
            return pb.RequestState.Name((await self.get(request_id)).state).removeprefix("REQUEST_STATE_").lower()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            return ""

    async def until_state(self, request_id: str, wanted: str, timeout_s: float = 5.0) -> None:
        await until(lambda: self.state(request_id), wanted, timeout_s)

    async def books(self) -> tuple[dict[str, int], list[str]]:
        found = await self.admin.Check(member_pb2.CheckRequest())
        return dict(found.books), list(found.faults)


class Link(RedisLink):
    """A router's connection to its store, which a test can cut or hold up."""

    cut = False

    def __init__(self, settings: RedisSettings, observe: Observe) -> None:
        super().__init__(settings, observe)
        #: What one operation waits for, by its name.
        self.gates: dict[str, Gate] = {}
        #: Operations that are carried out once more, and whose answer is lost.
        self.lost: set[str] = set()

    async def call(self, operation: str, do: Any) -> Any:
        if operation in self.gates:
            await self.gates[operation].passed()
        if self.cut:
            raise StoreUnavailable(operation, "cut by the test", 0.05)
        answer = await super().call(operation, do)
        if operation in self.lost:
            self.lost.remove(operation)
            raise StoreUnavailable(operation, "the answer was lost by the test", 0.05)
        return answer

    async def listen(self, channel: Any, wait_s: float) -> str | None:
        heard = await super().listen(channel, wait_s)
        return None if self.cut else heard


@dataclass
class World:
    """Fakes, routers and their clients; `links` are the routers' connections to the store."""

    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    routers: list[Process]
    clients: list[Client]
    links: list[Link]

    @property
    def client(self) -> Client:
        return self.clients[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    async def at_rest(self, timeout_s: float = 5.0) -> None:
        """Nothing is held anywhere: routers, store, members."""
        for client in self.clients:

            async def held(client: Client = client) -> tuple[dict[str, int], list[str]]:
                books, faults = await client.books()
                return {name: count for name, count in books.items() if count}, faults

            await until(held, ({}, []), timeout_s)

        async def members() -> list[object]:
            return [*(m.seats for m in self.decodes if m.seats), *(m.jobs for m in self.prefills if m.jobs)]

        await until(members, [], timeout_s)


async def until(ask: Any, wanted: object, timeout_s: float = 5.0) -> None:
    """Asks until the answer is the wanted one."""
    due = time.monotonic() + timeout_s
    while True:
        answer = await ask()
        if answer == wanted:
            return
        assert time.monotonic() < due, f"{answer!r} instead of {wanted!r} after {timeout_s} s"
        await asyncio.sleep(0.005)


def settings(redis_url: str, cell: str, prefills: Sequence[str], decodes: Sequence[str], **changes: Any) -> RouterSettings:
    """Settings of a router under test."""
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "metrics_port": None,
        "redis_url": redis_url,
        "cell": cell,
        "prefill": tuple(prefills) or ("none",),
        "decode": tuple(decodes),
        "drain_settle_s": 0.0,
        "drain_timeout_s": 5.0,
        "receive_max_bytes": 64 * 1024 * 1024,
        "default_max_output_tokens": 16,
        "exclude_s": 0.02,
    }
    return RouterSettings(**{**values, **changes})


@asynccontextmanager
async def router_world(
    redis_url: str,
    cell: str,
    *,
    prefills: int = 1,
    decodes: int = 1,
    routers: int = 1,
    decode_info: dict[str, object] | None = None,
    lease_s: float = 5.0,
    adapters: Mapping[str, dict[str, str]] | None = None,
    token: str = "",
    credentials: Any = None,
    **changes: Any,
) -> AsyncIterator[World]:
    """A cell; at the end everything is stopped in order. `changes` are settings of the routers, `token` and `credentials` are
    its clients'."""
    async with fake_pools(prefills, decodes, decode_info, adapters) as (prefill, decode):
        made: list[Process] = []
        clients: list[Client] = []
        links: list[Link] = []

        def open_store(settings: RedisSettings, name: str, observe: Observe) -> RedisStore:
            settings = replace(settings, lease_s=lease_s)
            links.append(Link(settings, observe))
            return RedisStore(settings, name, observe, links[-1])

        outside = Outside(open_store=open_store)
        try:
            for number in range(routers):
                mine = settings(
                    redis_url,
                    cell,
                    [one.address for one in prefill],
                    [one.address for one in decode],
                    **{"name": f"router-{number}", **changes},
                )
                process = Process(
                    lambda frame, mine=mine: Router(frame, mine, lambda: LoadedModel(MODEL, ByteTokenizer()), outside),
                    mine,
                    "router",
                )
                made.append(process)
                clients.append(Client((await process.open()).address, token, credentials))
            yield World(prefill, decode, made, clients, links)
        finally:
            for client in clients:
                await client.channel.close()
            for process in made:
                if process.frame is not None and not process.draining():
                    await process.drain()
                await process.close()


def request(request_id: str, text: str = "hello", **changes: Any) -> pb.GenerateRequest:
    """A good request."""
    return pb.GenerateRequest(**{"request_id": request_id, "text": text, "max_output_tokens": 8, **changes})

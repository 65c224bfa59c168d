"""Bad input over the wire: the right code, field and limit; the server goes on; nothing is left anywhere."""

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, redis_url
from tests.router_world import Client, request, router_world

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def changed(**fields: object) -> bytes:
    return request("bad", **fields).SerializeToString()


BAD_CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="bad")])
TABLE = [
    ("empty prompt", changed(text=""), INVALID, "text", "empty"),
    ("empty id", request("").SerializeToString(), INVALID, "request_id", "128"),
    ("unknown model", changed(model="gpt-99"), NOT_FOUND, "", "gpt-99"),
    ("temperature", changed(sampling=pb.SamplingParams(temperature=-1)), INVALID, "sampling.temperature", "0 to 10"),
    ("NaN", changed(sampling=pb.SamplingParams(min_p=float("nan"))), INVALID, "sampling.min_p", "finite"),
    ("top_p", changed(sampling=pb.SamplingParams(top_p=0)), INVALID, "sampling.top_p", "over 0"),
    ("17 stops", changed(stop=pb.StopParams(sequences=["s"] * 17)), INVALID, "stop.sequences", "16"),
    ("empty stop", changed(stop=pb.StopParams(sequences=[""])), INVALID, "stop.sequences[0]", "256"),
    ("no output", changed(max_output_tokens=0), INVALID, "max_output_tokens", "1 to 512"),
    ("over the context", changed(max_output_tokens=508), INVALID, "max_output_tokens", "at most 507"),
    ("prompt too long", changed(text="x" * 512), INVALID, "text", "at most 511"),
    ("20 MiB", changed(text="x" * (20 << 20)), INVALID, "text", "4194304"),
    ("not UTF-8", changed(text="MARK").replace(b"MARK", b"\xff\xfe\xfd\xfc"), INVALID, "text", "UTF-8"),
    ("no message", b"\xff\xff\xff", INVALID, "", "GenerateRequest"),
    ("template", changed(chat=BAD_CHAT), INVALID, "chat.messages", "template"),
]  # fmt: skip


async def test_bad_input_leaves_nothing_behind(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        before, _ = await world.client.books()
        for name, raw, code, field, says in TABLE:
            error = await world.client.raw(raw)
            assert error.code is code, (name, error)
            if field:
                assert [one.field for one in error.violations] == [field], name
            assert says in error.message or any(says in one.description for one in error.violations), (name, error)
            assert error.reason and error.domain == "tandem", name
            assert await world.client.state("bad") == "", name
        assert await world.client.books() == (before, [])
        assert not world.decode.opens and not world.prefill.requests
        assert (await world.client.generate(request("good"))).code is grpc.StatusCode.OK


async def test_longest_prompts_that_fit_run(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        for text, most in (("x" * 511, 1), ("x" * 256, 256), ("x", 511)):
            answer = await world.client.generate(request(f"r{most}", text, max_output_tokens=most))
            assert answer.code is grpc.StatusCode.OK, answer.error
        answer = await world.client.generate(pb.GenerateRequest(request_id="default", text="x" * 500))
        assert answer.events[0].started.max_output_tokens == 12


async def test_a_conversation_is_rendered(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        turns = [pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="hi" * 3000)]
        long = request("r1", chat=pb.ChatPrompt(messages=turns))
        assert "at most 511" in ((await world.client.generate(long)).error or pytest.fail()).message
        turns[1].content = "hi"
        short = request("r2", chat=pb.ChatPrompt(messages=turns))
        assert (await world.client.generate(short)).code is grpc.StatusCode.OK
        assert list(world.decode.opens[0].prompt_token_ids) == list(b"behi")


@pytest.mark.parametrize("method", ["Cancel", "Get"])
async def test_other_calls_name_their_fields_too(redis_url: str, cell: str, method: str) -> None:
    async with router_world(redis_url, cell) as world:
        for raw, says in ((b"", "request_id"), (b"\x0a\x02\xff\xfe", "UTF-8"), (b"\xff", "Request")):
            error = await _unary(world.client, method, raw)
            assert error.code() is INVALID and says in (error.details() or "")


async def _unary(client: Client, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.channel.unary_unary(f"/tandem.v1.InferenceService/{method}")(raw)
    return refused.value

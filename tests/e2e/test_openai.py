"""OpenAI's own client against a real cell: it gets what gRPC's clients get, and what it leaves is given back."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import Answer, ask, at_rest, fresh_id, stub_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Name three rivers."}]
TOKENS = 8
PATIENCE_S = 240.0


def client_of(cell: Cell, router: int = 0) -> openai.AsyncOpenAI:
    """A client of one router's HTTP door."""
    address = cell.routers[router].ready["http_address"]
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=PATIENCE_S)


@pytest.fixture
async def client(exact_cell: Cell) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the first router; the cell is at rest afterwards."""
    async with client_of(exact_cell) as made:
        yield made
    await at_rest(exact_cell)


async def by_grpc(cell: Cell, **changes: object) -> Answer:
    """The same by gRPC."""
    request = pb.GenerateRequest(request_id=fresh_id(), max_output_tokens=TOKENS, **changes)
    request.sampling.temperature = 0.0
    async with stub_of(cell) as stub:
        return await ask(stub, request, PATIENCE_S)


async def record_of(cell: Cell, request_id: str) -> pb.RequestRecord:
    """A request's record."""
    async with stub_of(cell) as stub:
        return (await stub.Get(pb.GetRequest(request_id=request_id), timeout=30)).record


async def test_completions_are_grpcs_outputs(client: openai.AsyncOpenAI, exact_cell: Cell) -> None:
    (model,) = (await client.models.list()).data
    expected = await by_grpc(exact_cell, text=PROMPT)
    asked = {"model": model.id, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    whole = await client.completions.create(**asked, logprobs=2)
    assert whole.choices[0].text == expected.text and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and expected.completed is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.completed.usage.prompt_tokens, TOKENS)
    told = whole.choices[0].logprobs
    assert told is not None and "".join(told.tokens) == expected.text and len(told.token_logprobs) == TOKENS
    assert told.text_offset[0] == 0 and all(len(top) >= 2 for top in told.top_logprobs)
    stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == TOKENS
    stopped = await client.completions.create(**asked, stop=told.tokens[2])
    assert stopped.choices[0].finish_reason == "stop" and expected.text.startswith(stopped.choices[0].text)


async def test_chats_are_grpcs_outputs(client: openai.AsyncOpenAI, exact_cell: Cell) -> None:
    expected = await by_grpc(exact_cell, chat=pb.ChatPrompt(messages=[pb.ChatMessage(**QUESTION[0])]))
    asked = {"model": "", "messages": QUESTION, "max_completion_tokens": TOKENS, "temperature": 0.0}
    whole = await client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=1)
    assert [choice.message.content for choice in whole.choices] == [expected.text] * 2
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert b"".join(bytes(one.bytes or ()) for one in whole.choices[0].logprobs.content).decode() == expected.text
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == whole.choices[0].logprobs.content[0].logprob
    deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert deltas[0].role == "assistant" and deltas[0].content
    assert "".join(delta.content or "" for delta in deltas) == expected.text


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="", prompt=PROMPT, temperature=99)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "INVALID_REQUEST")
    with pytest.raises(openai.NotFoundError, match="no model is called 'gpt-0'"):
        await client.completions.create(model="gpt-0", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="tools: is not supported"):
        tool = {"type": "function", "function": {"name": "f"}}
        await client.chat.completions.create(model="", messages=QUESTION, tools=[tool])


async def test_who_leaves_cancels(client: openai.AsyncOpenAI, exact_cell: Cell) -> None:
    left = fresh_id("http")
    asked = {"model": "", "prompt": PROMPT, "max_tokens": 500, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = await client.completions.create(**asked, extra_headers={"X-Request-Id": left})
    async for _ in stream:
        break
    await stream.close()

    async def cancelled() -> bool:
        return (await record_of(exact_cell, left)).state == pb.REQUEST_STATE_CANCELLED

    await until(cancelled, 60.0, "cancelled")
    assert (await record_of(exact_cell, left)).cause == "client_gone"


async def test_a_deadline_and_a_cancel_in_the_middle(client: openai.AsyncOpenAI, exact_cell: Cell) -> None:
    late, stopped = fresh_id("http"), fresh_id("http")
    asked = {"model": "", "prompt": PROMPT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as over:
        await client.completions.create(**asked, extra_headers={"X-Request-Id": late, "X-Request-Timeout": "1.5"})
    assert (over.value.status_code, over.value.code) == (504, "RPC_DEADLINE")

    async def ended() -> str:
        return (await record_of(exact_cell, late)).cause

    assert await until(ended, 60.0, "the end in the record") == "rpc_deadline"
    stream = await client.completions.create(**asked, stream=True, extra_headers={"X-Request-Id": stopped})
    with pytest.raises(openai.APIError) as broken:
        async for _ in stream:
            async with stub_of(exact_cell) as stub:
                await stub.Cancel(pb.CancelRequest(request_id=stopped), timeout=30)
    assert broken.value.code == "CLIENT_CANCEL"


async def test_two_clients_with_one_id_get_one_output(client: openai.AsyncOpenAI, exact_cell: Cell) -> None:
    shared = {"X-Request-Id": fresh_id("http")}
    asked = {"model": "", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "extra_headers": shared}
    async with client_of(exact_cell, 1) as other:
        first, second = await asyncio.gather(client.completions.create(**asked), other.completions.create(**asked))
    assert first.choices[0].text == second.choices[0].text and first.usage == second.usage
    with pytest.raises(openai.UnprocessableEntityError):
        await client.completions.create(**{**asked, "prompt": "another"})


async def test_health_and_metrics(exact_cell: Cell) -> None:
    async with httpx.AsyncClient(base_url=f"http://{exact_cell.http_address}", timeout=30) as http:
        assert (await http.get("/health")).status_code == 200
        assert "tandem_router_open_streams" in (await http.get("/metrics")).text

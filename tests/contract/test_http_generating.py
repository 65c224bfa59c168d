"""Completions and chat over HTTP, on a router over fakes: answers, streams, errors, ids, clients that go, deadlines."""

import asyncio
import socket

import httpx
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.fake_choices import text
from tests.http_world import CHAT, COMPLETIONS, base_of, chat, completion, http_world, streamed
from tests.redis_server import cell, redis_url
from tests.router_world import World, request, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_an_answer_in_one_piece(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        for path, body, prefix in ((COMPLETIONS, completion(), "cmpl-"), (CHAT, chat(), "chatcmpl-")):
            request_id = f"id{prefix}1"
            answer = await http.post(path, json=body, headers={"X-Request-Id": request_id})
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, request_id)
            told = answer.json()
            assert (told["id"], told["model"], told["usage"]) == (f"{prefix}{request_id}", "fake", USAGE)
            (choice,) = told["choices"]
            assert choice.get("text", choice.get("message", {}).get("content")) == "t0 t1 t2 "
            assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
            record = await world.client.get(request_id)
            assert (record.state, record.usage.returned_tokens) == (pb.REQUEST_STATE_FINISHED, 3)
        assert world.decode.opens[0].output_mode == pb.OUTPUT_MODE_FINAL_ONLY
        drawn = await http.post(COMPLETIONS, json=completion())
        assert await world.client.state(drawn.headers["x-request-id"]) == "finished"
        await world.at_rest()


async def test_a_stream_of_completions_and_its_counts(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await streamed(http, COMPLETIONS, completion(stream_options=options))
        assert (answer.status, answer.done) == (200, True)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert {chunk["object"] for chunk in answer.chunks} == {"text_completion"} and len({c["id"] for c in answer.chunks}) == 1
        assert [c["choices"][0]["text"] for c in answer.chunks[:-1]] == ["t0 ", "t1 ", "t2 ", ""]
        assert [c["usage"]["completion_tokens"] for c in answer.chunks[:-1]] == [1, 2, 3, 3]
        assert (answer.chunks[-1]["choices"], answer.chunks[-1]["usage"]) == ([], USAGE)
        assert answer.finish_reasons() == {0: ["length"]}
        plain = await streamed(http, COMPLETIONS, completion(stream_options={"include_usage": True}))
        assert [c["usage"] for c in plain.chunks] == [None] * 4 + [USAGE]
        assert all("usage" not in c for c in (await streamed(http, COMPLETIONS, completion())).chunks)
        await world.at_rest()


async def test_no_chunk_comes_before_the_first_token(redis_url: str, cell: str) -> None:
    """Clients measure the time to the first token by the first chunk that has choices: the role comes with the first text."""
    async with http_world(redis_url, cell) as (world, http):
        world.decode.script.output.hold()
        running = asyncio.create_task(streamed(http, CHAT, chat()))
        await world.decode.script.output.reached_by(1)
        world.decode.script.output.release()
        answer = await running
        deltas = [chunk["choices"][0]["delta"] for chunk in answer.chunks]
        assert deltas == [{"role": "assistant", "content": "t0 "}, {"content": "t1 "}, {"content": "t2 "}, {}]
        assert {chunk["object"] for chunk in answer.chunks} == {"chat.completion.chunk"}


async def test_several_choices_and_several_prompts(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        whole = {0: text(0, range(3)), 1: text(1, range(4))}
        body = completion(["hello", [1, 2, 3]], n=2)
        answer = await streamed(
            http, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, headers={"X-Request-Id": "m"}
        )
        assert answer.texts() == {**whole, 2: whole[0], 3: whole[1]}
        assert answer.finish_reasons() == {index: ["length"] for index in range(4)}
        counts = answer.chunks[-1]["usage"]
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (8, 14)
        assert [await world.client.state(f"m-{number}") for number in (0, 1)] == ["finished", "finished"]
        told = (await http.post(COMPLETIONS, json=body)).json()
        assert {c["index"]: c["text"] for c in told["choices"]} == {**whole, 2: whole[0], 3: whole[1]}
        ranked = (await http.post(COMPLETIONS, json=completion(best_of=3))).json()
        assert [(c["index"], c["text"]) for c in ranked["choices"]] == [(0, whole[0])]
        await world.at_rest()


async def test_wrong_fields_have_the_names_that_clients_know(redis_url: str, cell: str) -> None:
    cases: list[tuple[str, dict[str, object], str, str]] = [
        (COMPLETIONS, completion(temperature=99), "temperature", "temperature: must be from 0 to 10; got 99"),
        (COMPLETIONS, completion(stop=["a", ""]), "stop[1]", "must have 1 to 256 bytes"),
        (COMPLETIONS, completion(n=9), "n", "n: must be from 1 to 8; got 9"),
        (COMPLETIONS, completion(max_tokens=1000), "max_tokens", "so max_tokens may have at most 507"),
        (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "must be from 1 to 512; got 0"),
        (COMPLETIONS, completion(best_of=2, stream=True), "best_of", "more than n, 1, goes only with stream false"),
        (COMPLETIONS, completion([[1], [999]]), "prompt[1][0]", "must be at most 299"),
        (COMPLETIONS, completion([]), "prompt", "must be a text"),
        (COMPLETIONS, completion(["x"] * 129), "prompt", "must have at most 128 prompts; got 129"),
        (COMPLETIONS, completion(logprobs=21), "logprobs", "must be from 0 to 20"),
        (COMPLETIONS, completion(logprobs=True, n=0), "n", "must be from 1"),
        (COMPLETIONS, completion(logit_bias={"9" * 5000: 1}), "logit_bias", "its names must be token ids"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "must be from 0 to 20"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools", "is not supported"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of system"),
        (CHAT, chat("bad"), "messages", "the chat template refuses it"),
        (COMPLETIONS, completion(min_tokens=9), "min_tokens", "must be at most max_tokens, 8; got 9"),
        (COMPLETIONS, completion(guided_json={"type": "object", "not": {}}), "guided_json", "cannot be enforced"),
    ]
    async with http_world(redis_url, cell) as (world, http):
        for path, body, param, words in cases:
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", param), error
            assert words in error["message"], error
        unknown = await http.post(COMPLETIONS, json=completion(model="nobody"))
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        assert "this cell serves 'fake' (adapters: none)" in unknown.json()["error"]["message"]
        too_long = await http.post(COMPLETIONS, json=completion(), headers={"X-Request-Id": "x" * 129})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "X-Request-Id")
        late = await http.post(COMPLETIONS, json=completion(), headers={"X-Request-Timeout": "soon"})
        assert (late.status_code, late.json()["error"]["param"]) == (400, "X-Request-Timeout")
        assert not world.decode.opens


async def test_models_and_adapters_are_models(redis_url: str, cell: str) -> None:
    adapters = {name: {"terse": "f" * 16} for name in ("prefill-0", "decode-0")}
    async with http_world(redis_url, cell, adapters=adapters) as (world, http):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["parent"], one["max_model_len"]) for one in listed] == [
            ("fake", None, 512),
            ("terse", "fake", 512),
        ]
        assert (await http.get("/v1/models/terse")).json() == listed[1]
        assert (await http.get("/v1/models/none")).status_code == 404
        told = (await http.post(COMPLETIONS, json=completion(model="terse"))).json()
        assert told["model"] == "terse" and world.decode.opens[0].adapter.name == "terse"


async def test_a_full_queue_and_a_cell_without_members_say_when_to_come_back(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, queue_requests=1, decode_info={"max_sequences": 0}) as (world, http):
        waiting = asyncio.create_task(http.post(COMPLETIONS, json=completion(), headers={"X-Request-Id": "first"}))
        await world.client.until_state("first", "queued")
        full = await http.post(COMPLETIONS, json=completion())
        assert (full.status_code, full.json()["error"]["code"], full.headers["retry-after"]) == (429, "QUEUE_FULL", "1")
        await http.post(COMPLETIONS, json=completion(), headers={"x-stainless-retry-count": "1"})  # as OpenAI's clients come back
        assert "tandem_router_offered_requests_total 2" in (await http.get("/metrics")).text
        await world.client.cancel("first")
        cancelled = await waiting
        assert (cancelled.status_code, cancelled.json()["error"]["type"]) == (499, "CancelledError")
        await world.at_rest()
        await world.decode.stop()

        # One that comes before the router knows is queued: it shall not wait for long.
        async def refused() -> tuple[int, str]:
            answer = await http.post(COMPLETIONS, json=completion(), headers={"X-Request-Timeout": "1"})
            return answer.status_code, answer.json()["error"]["code"]

        await until(refused, (503, "NO_MEMBER"), 20.0)


async def test_one_id_is_one_request(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, routers=2) as (world, http):
        mine = {"X-Request-Id": "one"}
        world.decode.script.output.hold()
        first = asyncio.create_task(streamed(http, COMPLETIONS, completion(), headers=mine))
        await world.client.until_state("one", "decoding")
        async with httpx.AsyncClient(base_url=base_of(world, 1), timeout=30) as other:
            second = asyncio.create_task(streamed(other, COMPLETIONS, completion(), headers=mine))
            refused = await http.post(COMPLETIONS, json=completion("another body"), headers=mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
            assert refused.json()["error"]["param"] == "X-Request-Id"
            world.decode.script.output.release()
            assert (await first).texts() == (await second).texts() == {0: "t0 t1 t2 "}
        again = await streamed(http, COMPLETIONS, completion(), headers=mine)
        assert again.texts() == {0: "t0 t1 t2 "} and len(world.decode.opens) == 1
        await world.at_rest()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_output_that_is_not_kept_any_more_is_not_told_as_an_empty_one(redis_url: str, cell: str, stream: bool) -> None:
    async with http_world(redis_url, cell, replay_keep_requests=0) as (world, http):
        mine = {"X-Request-Id": "gone"}
        first = await http.post(COMPLETIONS, json=completion(stream=stream), headers=mine)
        assert first.status_code == 200
        again = await http.post(COMPLETIONS, json=completion(stream=stream), headers=mine)
        assert (again.status_code, again.json()["error"]["code"]) == (410, "REPLAY_GONE")
        assert len(world.decode.opens) == 1


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_cancels(redis_url: str, cell: str, stream: bool, begun: bool) -> None:
    async with http_world(redis_url, cell) as (world, http):
        gate = world.decode.script.ending if begun else world.prefill.script.compute
        gate.hold()
        body = completion(["hello", "hello"], stream=stream)
        running = asyncio.create_task(http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "left"}))
        await gate.reached_by(2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for number in (0, 1):
            await world.client.until_state(f"left-{number}", "cancelled")
            assert (await world.client.get(f"left-{number}")).cause == "client_gone"
        await world.at_rest()
        calls = (await http.get("/metrics")).text
        assert f'http_server_calls_total{{route="{COMPLETIONS}",status="499"}} 1.0' in calls


async def test_a_deadline_by_header(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        soon = {"X-Request-Timeout": "0.5"}
        world.prefill.script.compute.hold()
        nothing = await http.post(COMPLETIONS, json=completion(), headers=soon)
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (504, "RPC_DEADLINE")
        assert nothing.headers["x-should-retry"] == "false"
        assert (await streamed(http, COMPLETIONS, completion(), headers=soon)).status == 504
        world.prefill.script.compute.release()
        world.decode.script.ending.hold()
        partial = await streamed(http, COMPLETIONS, completion(), headers={"X-Request-Id": "late", "X-Request-Timeout": "2"})
        assert (partial.status, partial.done, partial.error["code"]) == (200, True, "RPC_DEADLINE")
        assert partial.error["status"] == 504 and partial.finish_reasons() == {0: []}
        assert partial.texts() == {0: "t0 t1 t2 "}
        assert (await world.client.get("late")).cause == "rpc_deadline"
        await world.at_rest()


async def test_what_breaks_in_the_middle_of_a_stream_is_told_there(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, max_attempts=1) as (world, http):
        world.decode.script.cut_after = 2
        broken = await streamed(http, CHAT, chat())
        assert (broken.status, broken.done) == (200, True)
        assert (broken.error["code"], broken.error["status"]) == ("DECODE_LOST", 503)
        assert broken.texts() == {0: "t0 t1 "} and broken.finish_reasons() == {0: []}
        world.decode.script.cut_after = None
        world.decode.script.ending.hold()
        running = asyncio.create_task(streamed(http, CHAT, chat(), headers={"X-Request-Id": "stopped"}))
        await world.decode.script.ending.reached_by(1)
        await world.client.cancel("stopped")
        cancelled = await running
        assert (cancelled.done, cancelled.error["type"], cancelled.error["status"]) == (True, "CancelledError", 499)
        await world.at_rest()


async def test_when_one_prompt_fails_the_others_are_cancelled(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        world.decode.script.ending.hold()
        running = asyncio.create_task(http.post(COMPLETIONS, json=completion(["a", "b"]), headers={"X-Request-Id": "two"}))
        await world.decode.script.ending.reached_by(2)
        await world.client.cancel("two-1")
        answer = await running
        assert (answer.status_code, answer.json()["error"]["status"]) == (499, 499)
        await world.client.until_state("two-0", "cancelled")
        await world.at_rest()


async def test_b17_a_lost_decode_member_costs_a_client_nothing(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, decodes=2) as (world, http):
        for decode in world.decodes:
            decode.script.cut_after = 2
        running = asyncio.create_task(streamed(http, COMPLETIONS, completion()))
        await until(lambda: _opens(world), 1)
        for decode in world.decodes:
            decode.script.cut_after = None if not decode.opens else decode.script.cut_after
        assert (await running).texts() == {0: "t0 t1 t2 "}
        await world.at_rest()


async def test_a_client_that_does_not_read_pauses_its_sequence(redis_url: str, cell: str) -> None:
    """No more than the bounded buffers is ever made ahead of it, and nothing is left out when it reads on."""
    async with http_world(redis_url, cell, buffer_bytes=4096) as (world, http):
        script = world.decode.script
        script.tokens, script.text = 400, lambda index: f"{index:04d}" * 1024
        reader, writer = await _slow_connection(http)
        body = b'{"prompt": "hello", "max_tokens": 400, "stream": true}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"x-request-id: slow\r\nconnection: close\r\n\r\n" + body)
        await until(lambda: _full(world), True, 20.0)
        await until(lambda: _settled(world), True, 20.0)
        said = len(next(iter(world.decode.seats)).said)
        assert said < script.tokens / 2
        data = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert [index for index in (0, said, script.tokens - 1) if f'"text":"{index:04d}'.encode() not in data] == []
        assert b"data: [DONE]" in data
        await world.at_rest()


async def test_the_trace_and_the_tenant_come_from_headers(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, trust_tenant_header=True) as (world, http):
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "Tandem-Tenant": "acme", "X-Request-Id": "traced"}
        assert (await http.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200
        record = await world.client.get("traced")
        assert record.tenant == "acme" and record.traceparent.split("-")[1] == trace
        assert world.decode.metadata[0]["traceparent"].split("-")[1] == trace


async def test_a_client_is_told_when_its_id_protects_it_from_nothing(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, redis_outage="serve") as (world, http):
        assert "tandem-idempotency" not in (await http.post(COMPLETIONS, json=completion())).headers
        world.links[0].cut = True
        for stream in (False, True):
            answer = await http.post(COMPLETIONS, json=completion(stream=stream))
            assert (answer.status_code, answer.headers["tandem-idempotency"]) == (200, "none")
        world.links[0].cut = False
        await until(lambda: _served(http, world), True, 20.0)


async def _served(http: httpx.AsyncClient, world: World) -> bool:
    return (await world.client.generate(request(f"r{http!s:.0}{id(world)}"))).error is None


async def _opens(world: World) -> int:
    return min(1, sum(len(decode.opens) for decode in world.decodes))


async def _full(world: World) -> bool:
    """Whether the router's log of the one request is full."""
    books, _ = await world.client.books()
    return books["unsent_bytes"] >= 4096


async def _settled(world: World) -> bool:
    """Whether the one seat says no more, although it had time to."""
    (seat,) = world.decode.seats
    before = len(seat.said)
    for _ in range(20):
        await world.client.books()
    return len(seat.said) == before


async def _slow_connection(http: httpx.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose client takes little ahead of its reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (http.base_url.host, http.base_url.port))
    return await asyncio.open_connection(sock=made, limit=4096)

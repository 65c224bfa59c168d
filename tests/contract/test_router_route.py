"""A request's way through a real router, over scripted members and a real store."""

import asyncio
from collections import deque
from collections.abc import Awaitable

import grpc
import pytest

from tandem.pools.v1 import decode_pb2, prefill_pb2
from tandem.v1 import inference_pb2 as pb
from tests.fake_member import Gate
from tests.fake_members import FakePrefill
from tests.redis_server import cell, redis_url
from tests.router_world import World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

STATES = ["created", "queued", "admitted", "prefilling", "decoding", "draining", "finished"]


async def value(now: int) -> int:
    """For `until`, which waits for what it asks."""
    return now


def states(record: pb.RequestRecord) -> list[str]:
    return [pb.RequestState.Name(one.state).removeprefix("REQUEST_STATE_").lower() for one in record.transitions]


async def test_happy_path(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        wanted = request("r1", text="hello", sampling=pb.SamplingParams(temperature=0.5, seed=7), priority=3)
        answer = await world.client.generate(wanted)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, "t0 t1 t2 ")
        started = answer.events[0].started
        assert (started.request_id, started.model, started.seed, started.prompt_tokens) == ("r1", "fake", 7, 5)
        assert (started.model_snapshot, started.max_output_tokens) == ("snapshot-1", 8)
        completed = answer.completed
        assert completed.state == pb.REQUEST_STATE_FINISHED
        assert completed.finish_reason == pb.FINISH_REASON_MAX_OUTPUT_TOKENS
        assert (completed.usage.prompt_tokens, completed.usage.returned_tokens, completed.usage.processed_tokens) == (5, 3, 7)
        times = completed.timings
        assert (times.prefill_queue_s, times.prefill_s, times.handover_s, times.handover_exposed_s) == (
            0.001,
            0.004,
            0.003,
            0.001,
        )
        assert 0 < times.first_token_s <= times.total_s and times.decode_s == 0.01 and times.queue_s >= 0
        record = await world.client.get("r1")
        assert states(record) == STATES
        assert (record.prefill_member, record.decode_member, record.attempt) == ("prefill-0", "decode-0", 1)
        assert record.sent_bytes == 9 and dict(record.released) == {"pages": 2}
        assert record.usage == completed.usage and record.timings == completed.timings
        await world.at_rest()


async def test_what_members_are_told(redis_url: str, cell: str) -> None:
    """Everything optional is filled in, durations are what is left, and the trace goes along (B52)."""
    async with router_world(redis_url, cell) as world:
        wanted = request("r1", stop=pb.StopParams(sequences=["END"], min_output_tokens=2))
        wanted.deadlines.overall.FromMilliseconds(9000)
        wanted.deadlines.inter_token.FromMilliseconds(700)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await world.client.generate(wanted, metadata=(("traceparent", parent),))
        opening, prefill = world.decode.opens[0], world.prefill.requests[0]
        assert (opening.key.request_id, opening.key.attempt) == ("r1", 1) == (prefill.key.request_id, prefill.key.attempt)
        assert list(opening.prompt_token_ids) == list(b"hello") == list(prefill.prompt_token_ids)
        sampling = opening.sampling
        assert sampling.HasField("temperature") and sampling.HasField("seed") and sampling.HasField("top_p")
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
        assert list(opening.stop.sequences) == ["END"] and opening.stop.min_output_tokens == 2
        assert opening.first_sequence_no == 1 and opening.inter_token_s == pytest.approx(0.7)
        assert 8.0 < opening.overall_remaining_s <= 9.0 and 8.0 < prefill.remaining_s <= 9.0
        assert (opening.prefill.member, opening.prefill.incarnation) == ("prefill-0", world.prefill.incarnation)
        assert opening.incarnation == world.decode.incarnation and prefill.incarnation == world.prefill.incarnation
        record = await world.client.get("r1")
        trace = parent.split("-")[1]
        assert {one.split("-")[1] for one in (record.traceparent, opening.traceparent, prefill.traceparent)} == {trace}
        assert world.decode.metadata[0]["traceparent"] == opening.traceparent


async def test_the_stream_to_decode_comes_about_while_the_store_is_asked(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        gate = world.links[0].gates["begin"] = Gate()
        gate.hold()
        asked = world.client.begin(request("r1"))
        await until(lambda: value(world.decode.calls), 1)
        assert not world.decode.opens, "there is no seat without a record"
        gate.release()
        assert (await asked).code is grpc.StatusCode.OK
        assert world.decode.calls == 1
        await world.at_rest()


async def test_a_store_that_outlasts_decodes_patience_costs_no_attempt(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.first_message_s = 0.02
        gate = world.links[0].gates["begin"] = Gate()
        gate.hold()
        asked = world.client.begin(request("r1"))
        await until(lambda: value(world.decode.silent_calls), 1)
        world.decode.script.first_message_s = None
        gate.release()
        assert (await asked).code is grpc.StatusCode.OK
        assert (world.decode.calls, len(world.decode.opens)) == (2, 1)
        assert (await world.client.get("r1")).attempt == 1
        await world.at_rest()


async def test_a_begin_without_an_answer_is_taken_up_by_who_asks_again(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.links[0].lost.add("begin")
        lost = await world.client.generate(request("r1"))
        assert lost.error is not None and (lost.code, lost.error.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert not world.decode.opens
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK and len(world.decode.opens) == 1
        record = await world.client.get("r1")
        assert (states(record), record.attempt) == (STATES, 1)
        await world.at_rest()


async def test_a_seed_is_drawn_and_told(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        answer = await world.client.generate(request("r1"))
        assert answer.events[0].started.seed == world.decode.opens[0].sampling.seed


async def test_final_only_has_its_text_in_the_terminal_event(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        answer = await world.client.generate(request("r1", output_mode=pb.OUTPUT_MODE_FINAL_ONLY))
        answer.check_order()
        assert len(answer.events) == 2 and answer.completed.text == "t0 t1 t2 "


async def test_aggregated_decode_computes_the_prompt(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, prefills=0, decode_info={"computes_prompts": True}) as world:
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.text == "t0 t1 t2 " and not world.decode.opens[0].HasField("prefill")
        await world.at_rest()


async def test_a_refused_request_goes_to_another_member_and_keeps_its_age(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.refusals.append(decode_pb2.Refused(reason="no_pages", detail="0 of 5", retryable=True))
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.completed.state == pb.REQUEST_STATE_FINISHED
        keys = [one.key.attempt for decode in world.decodes for one in decode.opens]
        assert sorted(keys) == [1, 2, 3]
        record = await world.client.get("r1")
        assert states(record)[:8] == ["created", "queued", "admitted", "queued", "admitted", "queued", "admitted", "prefilling"]
        await world.at_rest()


async def test_an_attempt_that_has_a_seat_already_costs_an_attempt(redis_url: str, cell: str) -> None:
    """Another router runs the request too, and the store has forgotten so: this client gets its answer all the same."""
    async with router_world(redis_url, cell) as world:
        duplicate = decode_pb2.Refused(reason="duplicate_attempt", detail="attempt 1 has a seat", retryable=True)
        world.decode.script.refusals.append(duplicate)
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.completed.state == pb.REQUEST_STATE_FINISHED
        assert [one.key.attempt for one in world.decode.opens] == [1, 2]
        await world.at_rest()


async def test_a_refusal_for_good_ends_the_request(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.refusals.append(decode_pb2.Refused(reason="too_long", detail="at most 7", retryable=False))
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "no_member")
        await world.at_rest()


@pytest.mark.parametrize(
    "failure",
    [
        grpc.StatusCode.UNAVAILABLE,
        prefill_pb2.PrefillFailed(cause="transfer_failed", retryable=True),
        prefill_pb2.PrefillFailed(cause="queue_full", retryable=True),
    ],
)
async def test_g4_prefill_lost_before_the_commit_is_another_attempt(redis_url: str, cell: str, failure: object) -> None:
    async with router_world(redis_url, cell, prefills=2) as world:
        for prefill in world.prefills:
            prefill.script.compute.hold()
        running = world.client.begin(request("r1"))
        first = await _at_work(world)
        first.script.failures.append(failure)
        for prefill in world.prefills:
            prefill.script.compute.release()
        answer = await running
        answer.check_order()
        assert answer.text == "t0 t1 t2 " and answer.completed.state == pb.REQUEST_STATE_FINISHED
        used = [(one.key.attempt, prefill.name) for prefill in world.prefills for one in prefill.requests]
        assert sorted(used)[0] == (1, first.name) and sorted(used)[1][0] == 2 and sorted(used)[1][1] != first.name
        # A client that still reads when its output has ended is one more thing to hear of.
        assert len([told for told in world.decode.heard if told != "keep_end"]) == 1
        await world.at_rest()


async def test_b49_attempts_are_bounded(redis_url: str, cell: str) -> None:
    """B49: every try has a number of its own, and there are only so many."""
    async with router_world(redis_url, cell, max_attempts=3) as world:
        world.prefill.script.failures.extend([grpc.StatusCode.UNAVAILABLE] * 5)
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "attempts_exhausted")
        assert [one.key.attempt for one in world.prefill.requests] == [1, 2, 3]
        await world.at_rest()


async def test_b49_retries_have_a_budget_over_all_requests(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, max_attempts=20, retry_share=0.0, retry_burst=20) as world:
        world.prefill.script.failures.extend([grpc.StatusCode.UNAVAILABLE] * 100)
        answers = [await world.client.generate(request(f"r{number}")) for number in range(3)]
        assert all(answer.code is grpc.StatusCode.UNAVAILABLE for answer in answers)
        assert len(world.prefill.requests) == 20 + 3
        await world.at_rest()


@pytest.mark.parametrize("label", ["layout_mismatch", "unknown_model", "model_error"])
async def test_what_another_prefill_member_may_not_share_is_tried_there(redis_url: str, cell: str, label: str) -> None:
    async with router_world(redis_url, cell, prefills=2, exclude_s=5.0) as world:
        once = deque([prefill_pb2.PrefillFailed(cause=label, retryable=True)])
        for prefill in world.prefills:
            prefill.script.failures = once
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK
        assert [len(prefill.requests) for prefill in world.prefills] == [1, 1]
        await world.at_rest()


async def test_a_prompt_on_which_two_models_failed_is_at_fault_itself(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, prefills=2, max_attempts=5, exclude_s=5.0) as world:
        for prefill in world.prefills:
            prefill.script.failures.extend([prefill_pb2.PrefillFailed(cause="model_error", retryable=True)] * 2)
        answer = await world.client.generate(request("r1"))
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.INTERNAL, "model_failed")
        assert answer.completed.finish_reason == pb.FINISH_REASON_MODEL_ERROR
        assert [len(prefill.requests) for prefill in world.prefills] == [1, 1]
        details = [step.detail for step in (await world.client.get("r1")).transitions if step.event == "prefill_lost"]
        assert details == ["model_failed"]
        await world.at_rest()


async def test_a_failed_model_is_told_as_such(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.prefill.script.failures.append(prefill_pb2.PrefillFailed(cause="model_error", retryable=False))
        answer = await world.client.generate(request("r1"))
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.INTERNAL, "model_failed")
        assert answer.completed.finish_reason == pb.FINISH_REASON_MODEL_ERROR
        await world.at_rest()


@pytest.mark.parametrize("code", [None, grpc.StatusCode.UNAVAILABLE])
@pytest.mark.parametrize("after", [0, 2])
async def test_b38_a_cut_stream_never_looks_finished(redis_url: str, cell: str, code: grpc.StatusCode | None, after: int) -> None:
    async with router_world(redis_url, cell, max_attempts=1) as world:
        world.decode.script.cut_after, world.decode.script.cut_code = after, code
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.code is grpc.StatusCode.UNAVAILABLE and answer.error is not None
        assert answer.error.reason == "DECODE_LOST"
        completed = answer.completed
        assert (completed.finish_reason, completed.state) == (pb.FINISH_REASON_TRANSPORT_ERROR, pb.REQUEST_STATE_FAILED)
        assert completed.cause == "decode_lost"
        assert (completed.usage.selected_tokens, completed.usage.returned_tokens) == (after, after)
        await world.at_rest()


async def test_b17_a_decode_member_that_is_killed(redis_url: str, cell: str) -> None:
    """Mid stream, and no other member comes: a typed error, no waiting for any clock."""
    async with router_world(redis_url, cell, failover_wait_s=0.2) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        await world.decode.stop()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "decode_lost")
        books, _ = await world.client.books()
        assert not any(books.values()), books


async def test_b17_a_decode_member_that_freezes(redis_url: str, cell: str) -> None:
    """Mid stream and silent: its Watch stream says nothing either, and that is what tells."""
    async with router_world(redis_url, cell, lost_after_s=0.6, failover_wait_s=0.2) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        world.decode.silent = True
        answer = await asyncio.wait_for(running, 5)
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "decode_lost")


async def test_b17_a_prefill_member_that_freezes_costs_only_time(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, prefills=2, lost_after_s=0.6) as world:
        for prefill in world.prefills:
            prefill.script.compute.hold()
        running = world.client.begin(request("r1"))
        frozen = await _at_work(world)
        frozen.silent = True
        for prefill in world.prefills:
            if prefill is not frozen:
                prefill.script.compute.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert answer.completed.state == pb.REQUEST_STATE_FINISHED
        frozen.script.compute.release()


async def test_a_restarted_member_is_told_apart(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        assert (await world.client.generate(request("r1"))).code is grpc.StatusCode.OK
        before = world.decode.incarnation
        await world.decode.restart()
        await until(lambda: _has_members(world), True)
        assert (await world.client.generate(request("r2"))).code is grpc.StatusCode.OK
        assert [one.incarnation for one in world.decode.opens] == [before, world.decode.incarnation]
        await world.at_rest()


async def test_b47_a_slow_reader_pauses_its_own_stream_only(redis_url: str, cell: str) -> None:
    """D2: unread output is bounded; another request runs as if nothing were; the reader gets everything in the end."""
    async with router_world(redis_url, cell, buffer_bytes=1024) as world:
        world.decode.script.tokens, world.decode.script.text = 400, lambda index: f"{index:03d}" + "x" * 2000
        call = world.client.stub.Generate(request("slow", max_output_tokens=400))
        assert (await call.read()).WhichOneof("event") == "started"
        await until(lambda: _paused(world), True)
        world.decode.script.text = lambda index: "y"
        other = await asyncio.wait_for(world.clients[0].generate(request("quick")), 5)
        assert other.code is grpc.StatusCode.OK
        texts = []
        while (event := await call.read()) is not grpc.aio.EOF:
            texts.append(event.delta.text[:3])
        assert len(texts) == 401 and await call.code() is grpc.StatusCode.OK
        await world.at_rest()


async def test_many_requests_share_few_pages(redis_url: str, cell: str) -> None:
    """Over budget the rest waits; every request ends; nothing is held afterwards."""
    async with router_world(redis_url, cell, decode_info={"total_pages": 4}) as world:
        answers = await asyncio.gather(*(world.client.generate(request(f"r{number}")) for number in range(30)))
        assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
        await world.at_rest()


async def _at_work(world: World) -> FakePrefill:
    """The prefill member that has the job."""

    async def busy() -> list[FakePrefill]:
        return [one for one in world.prefills if one.jobs]

    await until(lambda: _count(busy()), 1)
    return (await busy())[0]


async def _count(found: Awaitable[list[FakePrefill]]) -> int:
    return len(await found)


async def _has_members(world: World) -> bool:
    models = (await world.client.stub.ListModels(pb.ListModelsRequest())).models
    return models[0].decode_members == len(world.decodes)


async def _paused(world: World) -> bool:
    """Whether the decode fake waits for the router to read on: what it has written did not rise for a moment."""
    before = world.decode.script.output.reached
    await asyncio.sleep(0.1)
    return 1 < before == world.decode.script.output.reached < 400

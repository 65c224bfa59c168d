"""Conformance tests A and C of the decode loop through router, prefill and decode member, with a scripted model."""

from collections.abc import Sequence

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.e2e.cells import fresh_id
from tests.e2e.one_process import Model, OneProcessCell, one_process_cell, texts
from tests.redis_server import cell, redis_url
from tests.scripted import ScriptedRunner, ScriptedTokenizer

__all__ = ["cell", "redis_url"]

PROMPT = "a prompt of several pages"


def scripted(words: Sequence[bytes]) -> Model:
    """A model that says `words` one after the other, whatever comes after them."""
    tokenizer = ScriptedTokenizer(words)
    said = {tuple(tokenizer.encode(PROMPT)): [tokenizer.word(word) for word in words]}
    return Model(lambda: ScriptedRunner(tokenizer.vocabulary_size, said), tokenizer)


def stopping_at(stop: str) -> pb.GenerateRequest:
    """Greedy, with one stop."""
    return pb.GenerateRequest(
        request_id=fresh_id("conformance"),
        text=PROMPT,
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopParams(sequences=[stop]),
        max_output_tokens=20,
    )


async def ended_well(world: OneProcessCell, request: pb.GenerateRequest, stop: str) -> pb.Completed:
    """The last event said stop_sequence, the record says the same, nothing is held."""
    completed = world.arrived[-1].completed
    assert (completed.finish_reason, completed.matched_stop) == (pb.FINISH_REASON_STOP_SEQUENCE, stop)
    assert completed.state == pb.REQUEST_STATE_FINISHED
    record = (await world.stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
    assert (record.state, record.usage) == (pb.REQUEST_STATE_FINISHED, completed.usage)
    assert record.released["batch_places"] == 1 and record.released["landing_rows"] == 1
    assert [response.sequence_no for response in world.arrived] == list(range(len(world.arrived)))
    await world.at_rest()
    return completed


@pytest.mark.slow
async def test_conformance_a_a_stop_inside_the_second_token(redis_url: str, cell: str) -> None:
    """Tokens "AB", "CD", stop "BCD": selected(1), delta "A", decode(1), selected(2), stop_hit, completed(stop_sequence)."""
    request = stopping_at("BCD")
    async with one_process_cell(scripted([b"AB", b"CD"]), redis_url, cell) as world:
        world.decode_runner.gate.hold()
        call = world.stub.Generate(request, timeout=30)
        await world.until_kind(call, "delta")
        world.decode_runner.gate.release()
        await world.until_kind(call, "completed")
        completed = await ended_well(world, request, "BCD")
    order = [event for event in world.events if event[0] != "decode.started"]
    assert order == [
        ("selected", 1),
        ("delta", "A"),
        ("decode.completed", 1),
        ("selected", 2),
        ("stop_hit", 2),
        ("completed", "stop_sequence"),
    ]
    assert texts(world.arrived) == ["A"] and completed.text == ""
    usage = completed.usage
    assert (usage.selected_tokens, usage.returned_tokens, usage.processed_tokens) == (2, 0, usage.prompt_tokens + 1)
    assert world.decode_runner.steps == 1


@pytest.mark.slow
async def test_conformance_c_characters_and_a_stop_over_byte_tokens(redis_url: str, cell: str) -> None:
    """Bytes e4bd a0 e5 a5bd 45 4e 44 with stop "END": deltas "你", "好", nothing else."""
    pieces = [bytes.fromhex(piece) for piece in ("e4bd", "a0", "e5", "a5bd", "45", "4e", "44")]
    request = stopping_at("END")
    async with one_process_cell(scripted(pieces), redis_url, cell) as world:
        gate = world.decode_runner.gate
        gate.hold()
        call = world.stub.Generate(request, timeout=30)
        gate.step(1)
        await world.until_kind(call, "delta")  # so that no delta can grow by the next character
        gate.step(2)
        await world.until_kind(call, "delta")
        gate.release()
        await world.until_kind(call, "completed")
        completed = await ended_well(world, request, "END")
    assert texts(world.arrived) == ["你", "好"] and completed.text == ""
    seen = [event for event in world.events if event[0] in ("selected", "delta", "stop_hit", "completed")]
    assert seen == [
        ("selected", 1),
        ("selected", 2),
        ("delta", "你"),
        ("selected", 3),
        ("selected", 4),
        ("delta", "好"),
        ("selected", 5),
        ("selected", 6),
        ("selected", 7),
        ("stop_hit", 7),
        ("completed", "stop_sequence"),
    ]
    assert (completed.usage.selected_tokens, completed.usage.returned_tokens) == (7, 4)
    assert world.decode_runner.steps == 6

"""A decode member of a whole cell drains while it generates: its sequences move, and no client sees more than a pause."""

import asyncio
import time
from typing import Any

import pytest

from engine.batch import Batch, LayerMarks
from tandem.v1 import inference_pb2 as pb
from tests.e2e.cells import fresh_id
from tests.e2e.one_process import Model, OneProcessCell, one_process_cell, texts
from tests.redis_server import cell, redis_url
from tests.scripted import ScriptedRunner, ScriptedTokenizer

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

TOKENS = 90
STEP_S = 0.004


class PacedRunner(ScriptedRunner):
    """A step takes a while, as a model's does, so that a drain finds sequences in the middle."""

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> Any:
        time.sleep(STEP_S)
        return super().run(batch, marks)


def paced() -> Model:
    tokenizer = ScriptedTokenizer()
    return Model(lambda: PacedRunner(tokenizer.vocabulary_size, total_pages=400), tokenizer)


async def generated(world: OneProcessCell, number: int, begun: asyncio.Event) -> list[pb.GenerateResponse]:
    """All events of one request; `begun` when the third delta is there."""
    request = pb.GenerateRequest(
        request_id=fresh_id("moving"),
        text=f"request {number} is not like the others",
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=TOKENS,
    )
    events = []
    async for event in world.stub.Generate(request, timeout=30):
        events.append(event)
        if len(events) > 3:
            begun.set()
    return events


def value(process: Any, name: str) -> float:
    """One metric."""
    lines = process.frame.metrics.text().splitlines()
    return float(next(line for line in lines if line.startswith(f"tandem_{name} ")).split()[1])


async def test_g6_a_decode_member_drains_and_its_sequences_go_on_elsewhere(redis_url: str, cell: str) -> None:
    model = paced()
    async with one_process_cell(model, redis_url, cell, decodes=2) as world:
        begun = [asyncio.Event() for _ in range(8)]
        running = [asyncio.create_task(generated(world, number, event)) for number, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        leaving = max(world.decodes, key=lambda one: len(one.service.streams))
        seats = len(leaving.service.streams)
        assert seats > 0
        assert await leaving.process.drain() == 0
        assert not all(task.done() for task in running), "it need not wait for the ends of its requests"
        answers = await asyncio.gather(*running)
        script = ScriptedRunner(model.tokenizer.vocabulary_size)
        for number, events in enumerate(answers):
            prompt = model.tokenizer.encode(f"request {number} is not like the others")
            assert "".join(texts(events)) == bytes(script.said(prompt, TOKENS)).decode()
            assert [event.sequence_no for event in events] == list(range(len(events)))
            completed = events[-1].completed
            assert completed.finish_reason == pb.FINISH_REASON_MAX_OUTPUT_TOKENS
            assert (completed.usage.selected_tokens, completed.usage.returned_tokens) == (TOKENS, TOKENS)
        assert value(leaving.process, 'decode_moves_total{outcome="pushed"}') == seats
        assert value(world.prefill, 'prefill_requests_total{outcome="committed"}') == len(answers), "nothing was computed twice"
        await world.at_rest()

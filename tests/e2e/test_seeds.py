"""A seeded request gives the same tokens alone, among others and again; other seeds give others."""

import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, ask_all, fresh_id, stub_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _request(ids: list[int], seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=fresh_id("seed"),
        tokens=pb.TokenPrompt(ids=ids),
        sampling=pb.SamplingParams(temperature=1.0, top_p=0.95, top_k=200, seed=seed),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=24,
    )


async def test_seeded_requests_repeat(f32_cell: Cell, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The captain looked at the map and decided")
    async with stub_of(f32_cell) as stub:
        alone = await ask(stub, _request(ids, 7))
        others = [_request(tokenizer.encode(f"Story number {n} begins when"), 100 + n) for n in range(15)]
        among = (await ask_all(stub, [_request(ids, 7), *others], at_once=16))[0]
        again = await ask(stub, _request(ids, 7))
        different = [await ask(stub, _request(ids, seed)) for seed in (8, 9)]
    assert alone.token_ids and alone.text == among.text == again.text
    assert alone.token_ids == among.token_ids == again.token_ids
    assert len({alone.text, *(answer.text for answer in different)}) == 3


async def test_a_seed_is_drawn_and_returned(f32_cell: Cell, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once there was a lighthouse that")
    request = _request(ids, 0)
    request.sampling.ClearField("seed")
    async with stub_of(f32_cell) as stub:
        first = await ask(stub, request)
        again = await ask(stub, _request(ids, first.started.seed))
    assert first.text == again.text

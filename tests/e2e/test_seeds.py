"""A seeded request gives the same tokens alone, among others and again; other seeds give others."""

import pytest
import torch

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, ask_all, fresh_id, stub_of
from tests.e2e.conftest import cell_of
from tests.exact_dtype import EXACT_DTYPE
from tests.reference import all_logits, default_model, load_reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _request(ids: list[int], seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=fresh_id("seed"),
        tokens=pb.TokenPrompt(ids=ids),
        sampling=pb.SamplingParams(temperature=1.0, top_p=0.95, top_k=200, seed=seed),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=24,
    )


async def test_b45_seeded_requests_repeat(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The captain looked at the map and decided")
    async with stub_of(exact_cell) as stub:
        alone = await ask(stub, _request(ids, 7))
        others = [_request(tokenizer.encode(f"Story number {n} begins when"), 100 + n) for n in range(15)]
        among = (await ask_all(stub, [_request(ids, 7), *others], at_once=16))[0]
        again = await ask(stub, _request(ids, 7))
        different = [await ask(stub, _request(ids, seed)) for seed in (8, 9)]
    assert alone.token_ids and alone.text == among.text == again.text
    assert alone.token_ids == among.token_ids == again.token_ids
    assert len({alone.text, *(answer.text for answer in different)}) == 3


async def test_a_seed_is_drawn_and_returned(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once there was a lighthouse that")
    request = _request(ids, 0)
    request.sampling.ClearField("seed")
    async with stub_of(exact_cell) as stub:
        first = await ask(stub, request)
        again = await ask(stub, _request(ids, first.started.seed))
    assert first.text == again.text


async def test_b45_the_split_changes_no_token(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    short = tokenizer.encode("The captain looked at the map and decided")
    prompts = [short, short * 40]  # within one chunk, and over several
    with cell_of(dtype=EXACT_DTYPE, prefill_members=0) as together:
        answers = []
        for cell in (exact_cell, together):
            async with stub_of(cell) as stub:
                answers.append([(await ask(stub, _request(ids, 11))).token_ids for ids in prompts])
    assert answers[0] == answers[1]
    assert all(answers[0])


async def test_c8_log_probabilities_are_those_of_the_model_whatever_the_mode(f32_cell: Cell, tokenizer: Tokenizer) -> None:
    """Over the whole path: before the request's bias and temperature, with the bytes of each token, in every mode; once with
    the prompt's own, which the decode member then computes."""
    ids = tokenizer.encode("The captain looked at the map and decided")
    answers, prompt = {}, pb.Prompt()
    async with stub_of(f32_cell) as stub:
        for mode in (pb.OUTPUT_MODE_DELTA, pb.OUTPUT_MODE_CUMULATIVE, pb.OUTPUT_MODE_FINAL_ONLY):
            request = _request(ids, 7)
            request.output_mode, request.log_probabilities.top, request.max_output_tokens = mode, 3, 8
            request.sampling.logit_bias[tokenizer.encode(" the")[-1]] = 3.0
            request.echo_prompt = request.log_probabilities.prompt = mode == pb.OUTPUT_MODE_FINAL_ONLY
            events = [event async for event in stub.Generate(request)]
            prompt = next((event.prompt for event in events if event.HasField("prompt")), prompt)
            parts = [event.delta if event.HasField("delta") else event.completed for event in events]
            parts = parts[-2:-1] if mode == pb.OUTPUT_MODE_CUMULATIVE else parts
            answers[mode] = (
                "".join(part.text for part in parts),
                [token for part in parts for token in part.token_ids],
                [one for part in parts for one in part.log_probabilities],
            )
    text, token_ids, told = answers[pb.OUTPUT_MODE_DELTA]
    assert all(answer[0] == text and answer[1] == token_ids for answer in answers.values())
    assert (prompt.text, list(prompt.token_ids)) == (tokenizer.decode(ids), ids)
    assert b"".join(one.token for one in told).decode("utf-8", "ignore") == text
    logits = all_logits(load_reference(default_model()), [*ids, *token_ids])
    expected = torch.log_softmax(logits.double(), dim=-1)[:-1]
    for answer in answers.values():
        known = [*prompt.log_probabilities, *answer[2]]
        for token, row, one in zip([*ids, *token_ids][1:], expected, known, strict=True):
            assert one.log_probability == pytest.approx(float(row[token]), abs=2e-3)
            assert one.top_log_probabilities == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)

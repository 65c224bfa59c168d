"""A model that only transformers computes, through router, prefill, NIXL and decode: the text is transformers' own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tandem_cli.cell import Cell
from tests.e2e.cells import ask_all, at_rest, greedy_request, stub_of
from tests.e2e.conftest import CONTEXT_TOKENS, STEP_TOKENS, cell_of
from tests.e2e.word_tokenizer import write_tokenizer
from tests.engine import tiny_modules
from tests.engine.tiny_models import prompt
from tests.reference import greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 12


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A tiny GPT-NeoX whose tokens are words of two letters."""
    folder = tmp_path_factory.mktemp("tiny-neox")
    write_tokenizer(folder)
    model = tiny_modules.build("gpt_neox", max_position_embeddings=CONTEXT_TOKENS, eos_token_id=0)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def cell(neox: tuple[PreTrainedModel, Path]) -> Iterator[Cell]:
    with cell_of(model=str(neox[1]), dtype="float32") as cell:
        yield cell


async def test_greedy_text(cell: Cell, neox: tuple[PreTrainedModel, Path]) -> None:
    """Prompts of one chunk and of several, side by side."""
    prompts = [prompt(length, seed=3) for length in (1, 15, 16, 17, STEP_TOKENS, 2 * STEP_TOKENS + 9)]
    async with stub_of(cell) as stub:
        answers = await ask_all(stub, [greedy_request(ids, OUTPUT_TOKENS) for ids in prompts], at_once=3)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.reason == "max_output_tokens", answer.details
        # The end token has no text.
        assert answer.token_ids == [token for token in greedy(neox[0], ids, OUTPUT_TOKENS) if token]
    await at_rest(cell)

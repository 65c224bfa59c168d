"""Every architecture and rotary scaling against transformers in float32: prefill, chunks at page borders, decode, greedy text."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from engine.runner import ModelRunner
from tests.engine import tiny_models
from tests.engine.tiny_models import VARIANTS, Driver, greedy_with, prompt
from tests.reference import all_logits, greedy

PAGE = 8
LENGTH = 4 * PAGE + 3

Pair = tuple[PreTrainedModel, ModelRunner]


@pytest.fixture(params=sorted(VARIANTS), scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_models.build(request.param)
    ref = tiny_models.save(model, tmp_path_factory.mktemp(request.param))
    yield model, tiny_models.load(ref, page_tokens=PAGE)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_prefill_logits(pair: Pair) -> None:
    model, runner = pair
    ids = prompt(LENGTH)
    expected = all_logits(model, ids)
    driver = Driver(runner)
    for length in (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, LENGTH):
        assert_close(driver.feed(f"prompt of {length}", ids[:length]), expected[length - 1])


@pytest.mark.parametrize("first", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, LENGTH - 1])
def test_chunked_prefill_at_every_border(pair: Pair, first: int) -> None:
    model, runner = pair
    ids = prompt(LENGTH)
    driver = Driver(runner)
    assert driver.step(driver.rows("a", ids[:first], wants_logits=False)).shape == (0, runner.vocabulary_size)
    assert_close(driver.feed("a", ids[first:]), all_logits(model, ids)[-1])


def test_decode_steps_over_a_page_border(pair: Pair) -> None:
    model, runner = pair
    ids = prompt(LENGTH)
    expected = all_logits(model, ids)
    driver = Driver(runner)
    driver.feed("a", ids[: PAGE - 2])
    for position in range(PAGE - 2, 2 * PAGE + 2):
        assert_close(driver.feed("a", [ids[position]]), expected[position])


def test_greedy_tokens(pair: Pair) -> None:
    model, runner = pair
    ids = prompt(PAGE + 3, seed=1)
    assert greedy_with(partial(Driver(runner).feed, "a"), ids, 16) == greedy(model, ids, 16)


def test_far_positions_turn_as_in_the_reference(pair: Pair) -> None:
    model, runner = pair
    ids = prompt(tiny_models.CONTEXT, seed=2)
    assert_close(Driver(runner).feed("a", ids), all_logits(model, ids)[-1])


def test_a_chunk_of_many_windows(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Longer than what shares one mask, from the first position and behind others."""
    model = tiny_models.build("gemma3", max_position_embeddings=700, sliding_window=40)
    runner = tiny_models.load(tiny_models.save(model, tmp_path_factory.mktemp("long")), page_tokens=PAGE, total_pages=200)
    ids = prompt(650)
    expected = all_logits(model, ids)
    assert_close(Driver(runner).feed("whole", ids), expected[-1])
    driver = Driver(runner)
    driver.feed("chunks", ids[:45])
    assert_close(driver.feed("chunks", ids[45:]), expected[-1])

"""Kernels that libraries prepare for a shape and keep: how many shapes there are, and what a process grows by."""

import os
import random
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, Rows
from engine.kernels import CLASSES_PER_DOUBLING, KERNELS_VARIABLE, row_class
from engine.layout import pages_for
from engine.runner import ModelRunner
from engine.torch_chunk import KEY_MULTIPLE_TOKENS, padded_keys
from engine.torch_linear import padded
from tests.engine import tiny_models

STEP_TOKENS = 256
CONTEXT = 1024
PAGE_TOKENS = 16
STEPS = 300
#: After the first steps, measured: 19 MiB in bfloat16 with AMX, 59 in float32; with a shape for each length 126 and 307.
WARM_STEPS = 25
GROWTH_MIB = 100.0


def test_rows_come_in_few_classes() -> None:
    classes = {rows: row_class(rows) for rows in range(1, 513)}
    assert [rows for rows in range(1, 33) if classes[rows] == rows] == [*range(1, 17), *range(18, 33, 2)]
    assert len(set(classes.values())) == 2 * CLASSES_PER_DOUBLING + 5 * CLASSES_PER_DOUBLING
    for rows, taken in classes.items():
        assert rows <= taken <= rows + rows // CLASSES_PER_DOUBLING + 1 and row_class(taken) == taken


def test_padding_is_zeros_behind_the_rows() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert padded(x, 3) is x
    assert padded(x, 5).tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]
    assert [padded_keys(tokens) for tokens in (1, 64, 65)] == [KEY_MULTIPLE_TOKENS, KEY_MULTIPLE_TOKENS, 2 * KEY_MULTIPLE_TOKENS]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_of_all_lengths_do_not_make_the_process_grow(tmp_path: Path, dtype: str) -> None:
    """Prompts of any length, in chunks, as prefill has them."""
    model = tiny_models.build(
        "llama", hidden_size=384, intermediate_size=1024, num_hidden_layers=1, max_position_embeddings=CONTEXT
    )
    runner = tiny_models.load(tiny_models.save(model, tmp_path), PAGE_TOKENS, 1 + CONTEXT // PAGE_TOKENS, dtype)
    assert KERNELS_VARIABLE in os.environ
    lengths = random.Random(5)
    for _ in range(WARM_STEPS):
        _chunk(runner, lengths)
    warm_mib = _resident_mib()
    for _ in range(STEPS):
        _chunk(runner, lengths)
    grown_mib = _resident_mib() - warm_mib
    print(f"\ngrown by {grown_mib:.0f} MiB in {STEPS} steps")
    assert grown_mib < GROWTH_MIB


def _chunk(runner: ModelRunner, lengths: random.Random) -> None:
    """One chunk of 2 to STEP_TOKENS tokens somewhere in a prompt whose earlier rows are whatever is in the pages."""
    tokens = lengths.randint(2, STEP_TOKENS)
    first = lengths.choice([0, lengths.randrange(CONTEXT - tokens)])
    pages = range(1, 1 + pages_for(first + tokens, PAGE_TOKENS))
    ids = tiny_models.prompt(tokens)
    assert runner.run(Batch((Rows("s", ids, first, (pages,), wants_logits=True),))).isfinite().all()


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024

"""The plain read that steps are measured against: it reads everything, and each byte once."""

import numpy as np
import pytest

from engine.native.instruction_sets import InstructionSet
from engine.native.library import open_library
from tests.engine.native_sets import every_set, needs_compiler

pytestmark = needs_compiler

BLOCK_WORDS = 64


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_read_is_the_sum_of_all_words_whatever_the_threads(instructions: InstructionSet, threads: int) -> None:
    engine = open_library(instructions).engine(threads)
    random = np.random.default_rng(threads)
    ranges = [random.integers(0, 2**63, BLOCK_WORDS * blocks, dtype=np.uint64) for blocks in (0, 1, 2, 3, 101)]
    expected = sum(int(words.sum()) for words in ranges) % 2**64
    assert engine.read([(words.ctypes.data, words.nbytes) for words in ranges]) == expected

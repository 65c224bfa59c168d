"""Philox4x32-10: random numbers as a function of a key and a counter, for many rows at once. Pure.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. There is no state: the same key
and counter give the same numbers wherever and however often they are asked for, which is what makes a draw repeatable
after a pause, on another member, or in another batch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROUNDS = 10

_LOW = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each row. All arrays are uint64 of one shape and hold 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _WORD_BITS) ^ c1 ^ k0,
            second & _LOW,
            (first >> _WORD_BITS) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int], sequence_indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row, shape [R].

    The key is the seed (64 bits, low word first), the counter is (position, sequence index, 0, 0), each below 2**32. The
    two zero words are the place for other uses of the same seed, so that they never meet a draw.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    zero = np.zeros_like(seed)
    counter = (np.asarray(positions, dtype=np.uint64), np.asarray(sequence_indices, dtype=np.uint64), zero, zero)
    high, low, _, _ = philox(counter, (seed & _LOW, seed >> _WORD_BITS))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits * 2.0**-53

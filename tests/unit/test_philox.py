"""Philox4x32-10 against the known answers that Random123 publishes, and the numbers made from it."""

import numpy as np
import pytest

from engine.philox import philox, uniforms

ALL = 0xFFFFFFFF

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == answer


def test_known_answers_side_by_side() -> None:
    counter = tuple(np.array(column, dtype=np.uint64) for column in zip(*(row[0] for row in KNOWN), strict=True))
    key = tuple(np.array(column, dtype=np.uint64) for column in zip(*(row[1] for row in KNOWN), strict=True))
    answers = zip(*(word.tolist() for word in philox(counter, key)), strict=True)
    assert list(answers) == [row[2] for row in KNOWN]


def test_the_numbers_use_both_words_and_the_documented_order() -> None:
    high, low = KNOWN[0][2][:2]
    assert uniforms([0], [0], [0])[0] == ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    seed = 0xA4093822_243F6A88
    first, second, _, _ = philox(words(7, 3, 0, 0), words(0x243F6A88, 0xA4093822))
    assert uniforms([seed], [7], [3])[0] == ((int(first[0]) >> 5) * 2**26 + (int(second[0]) >> 6)) / 2**53


def test_b45_a_number_depends_on_nothing_but_seed_position_and_sequence() -> None:
    seeds, positions, sequences = [2**64 - 1, 1, 1, 1], [5, 5, 6, 5], [0, 0, 0, 1]
    together = uniforms(seeds, positions, sequences)
    alone = [uniforms([s], [p], [i])[0] for s, p, i in zip(seeds, positions, sequences, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = uniforms([11] * 20_000, range(20_000), [0] * 20_000)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 149  # 0.999 quantile for 99 degrees of freedom


def test_no_rows_no_numbers() -> None:
    assert uniforms([], [], []).shape == (0,)

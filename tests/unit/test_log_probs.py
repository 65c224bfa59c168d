"""Log-probabilities of one row: right, the same beside any rows, ties by id; they travel unchanged."""

import math

import numpy as np
import pytest

from decode_svc.wire_log_probs import for_client, for_router, from_router
from engine.log_probs import TokenLogProb, likeliest, log_prob, log_probs
from tandem.v1 import inference_pb2 as v1

SIZE = 1000


def rows(count: int, seed: int = 7, scale: float = 5.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, (count, SIZE)).astype(np.float32)


def test_values_are_those_of_a_plain_log_softmax() -> None:
    for row in rows(8):
        wide = row.astype(np.float64)
        plain = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        found = log_prob(row, 17, 5)
        assert found.value == pytest.approx(plain[17], rel=1e-6)
        order = sorted(range(SIZE), key=lambda token: (-plain[token], token))[:5]
        assert list(found.top_ids) == order
        assert list(found.top_values) == pytest.approx(plain[order], rel=1e-6)
        assert found.value == float(np.float32(found.value)), "it must be the same after it has travelled as a float32"


def test_all_of_them_together_are_certain() -> None:
    found = log_prob(rows(1)[0], 0, SIZE + 5)
    assert len(found.top_ids) == SIZE and sorted(found.top_ids) == list(range(SIZE))
    assert sum(math.exp(value) for value in found.top_values) == pytest.approx(1.0, abs=1e-5)


def test_a_row_is_the_same_bit_by_bit_alone_and_in_any_batch() -> None:
    values = rows(33)
    tokens, tops = [3 * index for index in range(33)], [index % 4 for index in range(33)]
    together = log_probs(values, tokens, tops)
    alone = [log_prob(row.copy(), token, top) for row, token, top in zip(values, tokens, tops, strict=True)]
    backwards = log_probs(values[::-1], tokens[::-1], tops[::-1])[::-1]
    assert list(together) == alone and backwards == together


def test_equal_values_are_told_by_id_also_at_the_border() -> None:
    rng = np.random.default_rng(3)
    for count in (0, 1, 2, 7, 50, SIZE):
        row = rng.integers(0, 4, SIZE).astype(np.float32)
        expected = sorted(range(SIZE), key=lambda token: (-row[token], token))[:count]
        assert likeliest(row, count).tolist() == expected


@pytest.mark.parametrize("largest", [3e38, -3e38, 0.0])
def test_large_logits_and_impossible_tokens_keep_their_numbers(largest: float) -> None:
    row = np.full(4, largest, dtype=np.float32)
    row[2] = -np.inf
    found = log_prob(row, 2, 4)
    assert found.value == -math.inf and found.top_ids == (0, 1, 3, 2)
    assert found.top_values[0] == pytest.approx(math.log(1 / 3))


def test_only_rows_that_want_them_and_have_a_token_get_any() -> None:
    values = rows(3)
    assert log_probs(values, [None, 5, 6], [2, None, 0]) == (None, None, log_prob(values[2], 6, 0))


def test_what_a_router_keeps_comes_back_as_it_was() -> None:
    told = (log_prob(rows(1)[0], 4, 3), TokenLogProb(-0.25), TokenLogProb(-math.inf, (1,), (0.0,)))
    assert from_router(for_router(told)) == told
    assert from_router(()) == ()


@pytest.mark.parametrize(
    "data", [b"\xff", v1.TokenLogProbability(top_token_ids=[1, 2], top_log_probabilities=[0.0]).SerializeToString()]
)
def test_what_no_member_can_have_told_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        from_router([data])


def test_a_client_gets_the_bytes_of_each_token() -> None:
    pieces = {7: b"\xe4\xbd", 8: b" a", 9: b""}.__getitem__
    (one, two) = for_client([7, 9], [TokenLogProb(-1.0, (8, 9), (-0.5, -2.0)), TokenLogProb(-3.0)], pieces)
    assert (one.log_probability, one.token, list(one.top_token_ids)) == (-1.0, b"\xe4\xbd", [8, 9])
    assert (list(one.top_log_probabilities), list(one.top_tokens)) == ([-0.5, -2.0], [b" a", b""])
    assert (two.token, list(two.top_token_ids)) == (b"", [])
    assert for_client([7], (), pieces) == []

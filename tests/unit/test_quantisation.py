"""Matrices as int8 and scales: how far they are from what they were made of."""

import pytest
import torch

from engine.quantisation import LARGEST, ROWS_AT_ONCE, parse_quantisation, quantise


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of unlike sizes."""
    generator = torch.Generator().manual_seed(outputs)
    sizes = torch.logspace(-6, 6, outputs)[:, None]
    return (torch.randn((outputs, inputs), generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 30), (96, 576), (ROWS_AT_ONCE + 3, 2)])
def test_every_weight_is_half_a_scale_away_at_most(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = matrix(*shape, dtype)
    small = quantise(weight)
    assert small.values.dtype == torch.int8 and small.values.shape == weight.shape
    assert small.scales.dtype == torch.float32 and small.scales.shape == weight.shape[:1]
    back = small.values.double() * small.scales.double()[:, None]
    away = (back - weight.double()).abs()
    # Dividing in float32 moves a number by as much again as 2^-24 of it, 127 scales at most.
    assert (away <= small.scales.double()[:, None] * (0.5 + 2 * LARGEST * 2**-24)).all()
    # The largest of a row is one end of the range, never the one that has no opposite.
    assert (small.values.abs().amax(dim=1) == LARGEST).all()


def test_the_scale_is_the_largest_over_127_and_halves_go_to_the_even_number() -> None:
    small = quantise(torch.tensor([[127.0, -0.5, 0.5, 1.5, 2.5, -3.4], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1, -2, 0, 0, 0, 2]]))
    assert small.scales.tolist() == [1.0, 0.0, pytest.approx(2 / 127)]
    assert small.values.tolist() == [[127, 0, 0, 2, 2, -3], [0] * 6, [64, -127, 0, 0, 0, 127]]


def test_numbers_too_small_for_a_scale_are_zero() -> None:
    small = quantise(torch.full((1, 3), 1e-45))
    assert small.values.tolist() == [[0, 0, 0]] and small.scales.tolist() == [0.0]


def test_a_row_that_is_not_a_number_stays_so() -> None:
    small = quantise(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
    assert small.scales.isnan().tolist() == [True, False]


def test_an_unknown_kind_is_refused_by_the_name_of_the_setting() -> None:
    with pytest.raises(ValueError, match=r"^weight_quantisation is 'int4'; choose one of off, int8$"):
        parse_quantisation("int4")

"""Weights of linear layers as int8 with a scale for each output."""

from dataclasses import dataclass
from enum import StrEnum

import torch

#: The largest int8 that is used: as far from 0 as the least one, so that there is no offset to subtract.
LARGEST = 127
#: Outputs that are widened at a time: a matrix as wide as a vocabulary needs no second one in float32.
ROWS_AT_ONCE = 4096


class WeightQuantisation(StrEnum):
    """What the matrices of linear layers, and the one that makes logits, are kept as."""

    OFF = "off"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix: values int8 [out, in], scales float32 [out]."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise(weight: torch.Tensor) -> Quantised:
    """weight [out, in] of any floating type, on any device; the result lies on the same.

    Symmetric, one scale for each output: scale = max |w| / 127 of the output's row, value = w / scale rounded to the nearest,
    halves to even (Wu and others, "Integer Quantization for Deep Learning Inference", 2020, section 3.1.2: "scale
    quantisation"). A row of zeros has scale 0. Each w differs from value * scale by half a scale at most, and by what float32
    rounds.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for begin in range(0, weight.shape[0], ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        wide = weight[rows].to(torch.float32)
        torch.div(wide.abs().amax(dim=1), LARGEST, out=scales[rows])
        # A row of zeros, or of numbers so small that their scale is none, is zero.
        divisors = torch.where(scales[rows] > 0, scales[rows], torch.inf)[:, None]
        values[rows] = (wide / divisors).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return Quantised(values, scales)


def parse_quantisation(name: str) -> WeightQuantisation:
    """Raises ValueError that names the setting and what it can be."""
    try:
        return WeightQuantisation(name)
    except ValueError:
        known = ", ".join(WeightQuantisation)
        raise ValueError(f"weight_quantisation is {name!r}; choose one of {known}") from None

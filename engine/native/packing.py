"""Weights in the order of the kernels' panels (see Weight in src/kernels.h)."""

import torch
from torch.nn import functional

from engine.model_weights import PackedLinear
from engine.native.arena import Arena
from engine.native.library import INPUT_BLOCK, PANEL, Weight

HALF = PANEL // 2


def padded(columns: int, to: int = INPUT_BLOCK) -> int:
    return -(-columns // to) * to


def pack(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> PackedLinear:
    """weight [out, in] and bias [out] in bfloat16."""
    outputs, inputs = weight.shape
    return PackedLinear(_panels(weight, arena), _float_bias(bias), inputs, outputs)


def pack_gate_up(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> PackedLinear:
    """weight [2 * intermediate, in], gates then ups: half a panel of gates, then the ups of the same columns."""
    intermediate, inputs = weight.shape[0] // 2, weight.shape[1]
    mixed_bias = None if bias is None else _mixed(bias[:, None])[:, 0]
    return PackedLinear(_panels(_mixed(weight), arena), _float_bias(mixed_bias), inputs, intermediate)


def describe(packed: PackedLinear) -> Weight:
    bias = None if packed.bias is None else packed.bias.data_ptr()
    return Weight(packed.weight.data_ptr(), bias, padded(packed.in_features), packed.out_features)


def _mixed(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * intermediate, n], gates then ups, to sixteen gates, their ups, and so on."""
    halves = [functional.pad(half, (0, 0, 0, -half.shape[0] % HALF)) for half in gate_up.chunk(2)]
    return torch.stack([half.view(-1, HALF, half.shape[1]) for half in halves], dim=1).flatten(0, 2)


def _panels(weight: torch.Tensor, arena: Arena) -> torch.Tensor:
    """[panel, block of inputs, half panel, pair of inputs, output, input of the pair], padded with zeros."""
    outputs, inputs = weight.shape
    full = functional.pad(weight, (0, padded(inputs) - inputs, 0, padded(outputs, PANEL) - outputs))
    split = full.view(-1, 2, HALF, full.shape[1] // INPUT_BLOCK, INPUT_BLOCK // 2, 2)
    panels = split.permute(0, 3, 1, 4, 2, 5)
    return arena.empty(tuple(panels.shape), weight.dtype).copy_(panels)


def _float_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else functional.pad(bias.to(torch.float32), (0, padded(bias.shape[0], PANEL) - bias.shape[0]))

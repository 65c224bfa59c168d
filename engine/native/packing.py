"""Weights in the order of the kernels' panels (see Weight in src/kernels.h)."""

import torch
from torch.nn import functional

from engine.model_weights import LowRank, PackedLinear
from engine.native.arena import Arena
from engine.native.library import INPUT_BLOCK, PANEL, Weight
from engine.quantisation import WeightQuantisation, quantise

HALF = PANEL // 2


def padded(columns: int, to: int = INPUT_BLOCK) -> int:
    return -(-columns // to) * to


class Packer:
    """Puts weights one behind the other into memory of its own."""

    def __init__(self, quantisation: WeightQuantisation) -> None:
        self._quantised = quantisation is WeightQuantisation.INT8
        self._arena = Arena()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [out, in] and bias [out] in bfloat16."""
        outputs, inputs = weight.shape
        return self._packed(weight, bias, inputs, outputs)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [2 * intermediate, in], gates then ups: half a panel of gates, then the ups of the same columns."""
        intermediate, inputs = weight.shape[0] // 2, weight.shape[1]
        mixed_bias = None if bias is None else _mixed(bias[:, None])[:, 0]
        return self._packed(_mixed(weight), mixed_bias, inputs, intermediate)

    def pack_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """down [rank, in] and up [out, rank] in bfloat16, never quantised: their results are whole panels."""
        return LowRank(self._whole(down), self._whole(up))

    def pack_gate_up_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """up [2 * intermediate, rank], gates then ups: its results are in the order of `pack_gate_up`."""
        return self.pack_update(down, _mixed(up))

    def _whole(self, weight: torch.Tensor) -> PackedLinear:
        outputs, inputs = weight.shape
        return PackedLinear(_panels(weight, self._arena), None, inputs, padded(outputs, PANEL))

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None, inputs: int, columns: int) -> PackedLinear:
        if not self._quantised:
            return PackedLinear(_panels(weight, self._arena), _of_outputs(bias), inputs, columns)
        small = quantise(weight)
        panels, scales = _panels(small.values, self._arena), _of_outputs(small.scales)
        return PackedLinear(panels, _of_outputs(bias), inputs, columns, scales)


def describe(packed: PackedLinear) -> Weight:
    scales, bias = (None if each is None else each.data_ptr() for each in (packed.scales, packed.bias))
    return Weight(packed.weight.data_ptr(), scales, bias, padded(packed.in_features), packed.out_features)


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


def _of_outputs(values: torch.Tensor | None) -> torch.Tensor | None:
    """[out] as float32, padded with zeros to whole panels."""
    if values is None:
        return None
    return functional.pad(values.to(torch.float32), (0, padded(values.shape[0], PANEL) - values.shape[0]))

"""Linear layers in torch: oneDNN weights packed once where the CPU and build have them, the plain product elsewhere."""

from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from engine.kernels import row_class
from engine.model_weights import PackedLinear
from engine.quantisation import quantise

# oneDNN chooses the weight's order for a number of rows. 16 serves 1 to 512 rows well; 1 makes larger batches up to 2x slower.
PACKED_ROWS_HINT = 16
PROBE_SIZE = 64
SINGLE_ROW_PROBES = 3


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with zeros behind its last row up to `rows` rows; `x` itself when it has as many."""
    if x.shape[0] == rows:
        return x
    wide = x.new_empty((rows, *x.shape[1:]))
    wide[: x.shape[0]].copy_(x)
    wide[x.shape[0] :].zero_()
    return wide


class Linears(Protocol):
    """Packs weights [out, in] and applies them to [T, in]."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear: ...

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor: ...


class PlainLinears:
    """torch's own product on the weight as it is."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return PackedLinear(weight.contiguous(), bias, weight.shape[1], weight.shape[0])

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return functional.linear(x, packed.weight, packed.bias)


class OneDnnLinears:
    """oneDNN's packed weights. Measured on AVX-512 bf16 without AMX: 1.3 to 1.8 times faster than the plain product at 1 to 32
    rows in bfloat16, 2 to 2.4 times at all sizes in float32."""

    def __init__(self) -> None:
        self._reorder = torch.ops.mkldnn._reorder_linear_weight.default
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._single_differs: dict[tuple[int, int], bool] = {}

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        packed = self._reorder(weight.contiguous(), PACKED_ROWS_HINT)
        outputs, inputs = weight.shape
        if (inputs, outputs) not in self._single_differs:
            self._single_differs[inputs, outputs] = self._differs_for_one_row(packed, inputs, weight.dtype)
        return PackedLinear(packed, bias, inputs, outputs)

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """A request must not read differently because it was alone for a step. Where oneDNN sums a single row in another
        order than the same row among others, one row is computed as two."""
        rows = row_class(x.shape[0])
        if rows == 1 and self._single_differs[packed.in_features, packed.out_features]:
            rows = 2
        return self._multiply(padded(x, rows), packed.weight, packed.bias)[: x.shape[0]]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x @ weight.T for a weight that is not worth packing."""
        # Other strides send oneDNN to its reference code, a thousand times slower.
        assert x.is_contiguous() and weight.is_contiguous()
        return self._multiply(x, weight, None)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = self._product(x, weight, bias, "none", [], "")
        return product

    def _differs_for_one_row(self, weight: torch.Tensor, inputs: int, dtype: torch.dtype) -> bool:
        """Tried once a shape. The negated result as bias leaves what rounding cut off: there another order of sums shows."""
        x = torch.randn(SINGLE_ROW_PROBES, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
        for row in range(SINGLE_ROW_PROBES):
            bias = self._multiply(x, weight, None)[row].neg()
            if not torch.equal(self._multiply(x[row : row + 1], weight, bias)[0], self._multiply(x, weight, bias)[row]):
                return True
        return False


class QuantisedLinears:
    """int8 values, which every dtype here holds as they are, multiplied by other linears: no memory is saved, and no bit of what
    the values mean is lost. The sums are scaled in float32, so that a row has the bits that it has without scales."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        small = quantise(weight)
        packed = self._linears.pack(small.values.to(weight.dtype), None)
        return replace(packed, bias=None if bias is None else bias.to(torch.float32), scales=small.scales)

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert packed.scales is not None, "packed by these linears"
        sums = self._linears.apply(x, replace(packed, bias=None)).to(torch.float32).mul_(packed.scales)
        return (sums if packed.bias is None else sums.add_(packed.bias)).to(x.dtype)


def choose_linears(device: torch.device, dtype: torch.dtype) -> Linears:
    """oneDNN's packed linears when they work here and agree with the plain product, else the plain one."""
    built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return OneDnnLinears() if device.type == "cpu" and built_in and _packed_agrees(dtype) else PlainLinears()


def _packed_agrees(dtype: torch.dtype) -> bool:
    """Private operators may change or refuse a CPU: one small product decides, not a version number."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(PROBE_SIZE, PROBE_SIZE, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(PROBE_SIZE, generator=generator).to(dtype)
    try:
        linears = OneDnnLinears()
        packed = linears.apply(x, linears.pack(weight, bias))
    except (AttributeError, RuntimeError):
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    return torch.allclose(
        packed.float(), functional.linear(x.float(), weight.float(), bias.float()), rtol=tolerance, atol=tolerance * 8
    )

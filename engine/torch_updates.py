"""What adapters add to products in torch: two small products in float32 for the rows of each adapter."""

from collections.abc import Sequence

import torch

from engine.backend import RowsUpdate
from engine.model_weights import LowRank
from engine.torch_linear import choose_linears


class TorchUpdates:
    """Packs updates and adds them. In float32, whatever the products are: they are small, and rounded once with the sum."""

    def __init__(self, device: torch.device) -> None:
        self._linears = choose_linears(device, torch.float32)

    def pack(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """down [rank, in], up [out, rank] in float32."""
        return LowRank(self._linears.pack(down, None), self._linears.pack(up, None))

    def add(self, x: torch.Tensor, own_product: torch.Tensor, updates: Sequence[RowsUpdate]) -> torch.Tensor:
        """own_product [T, out] of x [T, in], with what `updates` add to their rows; the other rows stay as they are."""
        for each in updates:
            rows = torch.from_numpy(each.rows).to(x.device)
            inner = self._linears.apply(x.index_select(0, rows).to(torch.float32), each.update.down)
            added = self._linears.apply(inner, each.update.up)
            own_product[rows] = (own_product.index_select(0, rows).to(torch.float32) + added).to(own_product.dtype)
        return own_product

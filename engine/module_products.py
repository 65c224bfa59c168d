"""The linear layers of transformers' modules, computed by a backend: packed, and each row as if it were alone."""

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.backend import Backend


class WatchedLinear(nn.Linear):
    """A linear layer that notes when something but itself reads its weight: it has to keep that where others compute with it."""

    read_by_others = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.read_by_others = True
        return super().__getattr__(name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…, in] to […, out]."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None, "a linear layer has a weight"
        return functional.linear(input, weight, bias)


class PackedProduct(nn.Module):
    """A linear layer whose weight is a backend's."""

    def __init__(self, backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._backend = backend
        self._packed = backend.pack(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] to […, out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        # An expert can be left without rows.
        out = self._backend.linear(rows, self._packed) if rows.shape[0] else rows.new_empty((0, self._packed.out_features))
        return out.view(*x.shape[:-1], self._packed.out_features)


class PackedHead(nn.Module):
    """The linear layer that makes logits, which stay float32: rounded to bfloat16 they would tie."""

    def __init__(self, backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._backend = backend
        self._packed = backend.pack_head(weight)
        self._bias = None if bias is None else bias.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, hidden] to float32 […, vocabulary]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if not rows.shape[0]:
            return rows.new_empty((*x.shape[:-1], self._packed.out_features), dtype=torch.float32)
        logits = self._backend.logits(rows, self._packed)
        return (logits if self._bias is None else logits + self._bias).view(*x.shape[:-1], -1)


def watch(model: nn.Module) -> None:
    """From now on the model's linear layers are WatchedLinear."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WatchedLinear


def pack_products(model: nn.Module, head: nn.Module | None, backend: Backend, dtype: torch.dtype) -> None:
    """Put the backend's products in the place of all watched layers of that dtype whose weight nobody else has read.

    head: the layer that makes logits. Each weight goes as soon as it is packed.
    """
    places = _places(model)
    while places:
        linear, where = places.popleft()
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        if linear.read_by_others or weight is None or weight.dtype != dtype:
            continue
        kind = PackedHead if linear is head else PackedProduct
        packed = kind(backend, weight.detach(), None if bias is None else bias.detach())
        for parent, name in where:
            setattr(parent, name, packed)


def _places(model: nn.Module) -> deque[tuple[WatchedLinear, list[tuple[nn.Module, str]]]]:
    """The watched layers, and where each of them is: in which modules, under which names."""
    places: dict[WatchedLinear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if isinstance(child, WatchedLinear):
                places.setdefault(child, []).append((parent, name))
    return deque(places.items())

"""A model's weights as the decoder uses them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the order its backend likes best. Only the backend that packed it may use it.

    scales: float32, one for each output, where the weight is quantised; None otherwise.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QueryFactors:
    """Queries that are made by two products with a norm between them."""

    down: PackedLinear
    norm: torch.Tensor
    up: PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """head_norms: float32 [heads + kv_heads, head_dim] where query and key heads are normalised; [rank] with attention over
    latent vectors. gate_up: gates, then ups. query: where queries are not a part of `qkv`.

    attention_post_norm, mlp_post_norm: of what attention and MLP give, where it is normalised before it is added.
    """

    attention_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    query: QueryFactors | None = None


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a product: up(down(x)), with the adapter's scale in `up`. Packed by a backend for itself."""

    down: PackedLinear
    up: PackedLinear


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """What an adapter changes in one layer; None where it changes nothing."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding: [vocabulary, hidden]; head: the same matrix when tied, packed. embedding_scale: what its rows are multiplied
    with, rounded to their dtype. adapters: by name, a value for each layer."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear
    embedding_scale: float = 1.0
    adapters: Mapping[str, tuple[AdapterLayer, ...]] = field(default_factory=dict)

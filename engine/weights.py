"""A model's weights in the form the decoder uses, read layer by layer: loading needs little more memory than the result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.backend import Backend, PackedLinear
from models.config import ModelConfig

MAX_NAMED_TENSORS = 3


class WeightsError(ValueError):
    """The files do not hold the model that their configuration describes."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Parts of the model (embedding, each layer, head) that are ready."""

    done: int
    total: int


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, whatever the file format; query and key rows in Hugging Face order."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantised and converted to dtype, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """head_norms: float32 [heads + kv_heads, head_dim] where query and key heads are normalised. gate_up: gates, then ups."""

    attention_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding: [vocabulary, hidden]; head: the same matrix when tied, packed."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear


class WeightLoader:
    """Reads one source into the packing of one backend, checking every shape against the configuration."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, backend: Backend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._source = source
        self._config = config
        self._backend = backend
        self._device = device
        self._dtype = dtype
        self._names = source.names()
        self._read_names: set[str] = set()

    def load(self, progress: Callable[[LoadProgress], None] | None = None) -> ModelWeights:
        """Raises WeightsError when a tensor is missing, has another shape, or is one that this decoder would not use."""
        config = self._config
        total = config.layers + 2
        report = progress or _silent
        report(LoadProgress(0, total))
        embedding = self._tensor("model.embed_tokens.weight", (config.vocabulary_size, config.hidden))
        report(LoadProgress(1, total))
        layers = []
        for index in range(config.layers):
            layers.append(self._layer(index))
            report(LoadProgress(index + 2, total))
        final_norm = self._tensor("model.norm.weight", (config.hidden,))
        head = self._backend.pack_head(self._head(embedding))
        self._refuse_unused()
        report(LoadProgress(total, total))
        return ModelWeights(embedding, tuple(layers), final_norm, head)

    def _head(self, embedding: torch.Tensor) -> torch.Tensor:
        self._read_names.add("lm_head.weight")
        if self._config.tie_embeddings:
            return embedding
        return self._tensor("lm_head.weight", (self._config.vocabulary_size, self._config.hidden))

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            attention_norm=self._tensor(prefix + "input_layernorm.weight", (config.hidden,)),
            qkv=self._linear(
                [(attention + "q_proj", queries), (attention + "k_proj", keys), (attention + "v_proj", keys)],
                config.hidden,
                config.attention_bias,
            ),
            head_norms=self._head_norms(attention) if config.qk_norm else None,
            output=self._linear([(attention + "o_proj", config.hidden)], queries, config.attention_output_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", (config.hidden,)),
            gate_up=self._linear(
                [(mlp + "gate_proj", config.intermediate), (mlp + "up_proj", config.intermediate)], config.hidden, config.mlp_bias
            ),
            down=self._linear([(mlp + "down_proj", config.hidden)], config.intermediate, config.mlp_bias),
        )

    def _linear(self, parts: list[tuple[str, int]], inputs: int, with_bias: bool) -> PackedLinear:
        """Several matrices with one input become one product."""
        weight = torch.cat([self._tensor(name + ".weight", (outputs, inputs)) for name, outputs in parts])
        bias = torch.cat([self._tensor(name + ".bias", (outputs,)) for name, outputs in parts]) if with_bias else None
        return self._backend.pack(weight, bias)

    def _head_norms(self, attention: str) -> torch.Tensor:
        config = self._config
        query = self._tensor(attention + "q_norm.weight", (config.head_dim,)).to(torch.float32)
        key = self._tensor(attention + "k_norm.weight", (config.head_dim,)).to(torch.float32)
        return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise WeightsError(f"tensor {name} is missing; the files do not hold the model that their configuration describes")
        if self._source.shape(name) != shape:
            raise WeightsError(f"tensor {name} has shape {list(self._source.shape(name))}; the configuration says {list(shape)}")
        self._read_names.add(name)
        return self._source.read(name, self._dtype).to(self._device)

    def _refuse_unused(self) -> None:
        """A tensor that nothing reads changes what the model says; running without it would be a wrong answer, not an error."""
        unused = sorted(name for name in self._names - self._read_names if not name.endswith(".rotary_emb.inv_freq"))
        if unused:
            shown = ", ".join(unused[:MAX_NAMED_TENSORS])
            raise WeightsError(
                f"{len(unused)} tensors have no place in a {self._config.architecture} decoder, among them {shown}"
            )


def _silent(_: LoadProgress) -> None:
    return None

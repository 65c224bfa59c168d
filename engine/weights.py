"""A model's weights in the form the decoder uses, read layer by layer: loading needs little more memory than the result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.backend import Backend
from engine.model_weights import LayerWeights, ModelWeights, PackedLinear, QueryFactors
from engine.weights_latent import absorbed
from models.config import LatentConfig, ModelConfig

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
class _Attention:
    """The part of LayerWeights that attention has."""

    qkv: PackedLinear
    head_norms: torch.Tensor | None
    output: PackedLinear
    query: QueryFactors | None = None


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
        final_norm = self._norm("model.norm", config.hidden)
        head = self._backend.pack_head(self._head(embedding))
        self._refuse_unused()
        report(LoadProgress(total, total))
        return ModelWeights(embedding, tuple(layers), final_norm, head, config.embedding_scale)

    def _head(self, embedding: torch.Tensor) -> torch.Tensor:
        self._read_names.add("lm_head.weight")
        if self._config.tie_embeddings:
            return embedding
        return self._tensor("lm_head.weight", (self._config.vocabulary_size, self._config.hidden))

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        attends = self._attention(attention, queries, keys) if config.latent is None else self._latent(attention, config.latent)
        # With a second norm around the MLP, the first one has another name.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return LayerWeights(
            attention_norm=self._norm(prefix + "input_layernorm", config.hidden),
            qkv=attends.qkv,
            head_norms=attends.head_norms,
            output=attends.output,
            query=attends.query,
            mlp_norm=self._norm(prefix + mlp_norm, config.hidden),
            gate_up=self._backend.pack_gate_up(
                *self._joined(
                    [(mlp + "gate_proj", config.intermediate), (mlp + "up_proj", config.intermediate)],
                    config.hidden,
                    config.mlp_bias,
                )
            ),
            down=self._linear([(mlp + "down_proj", config.hidden)], config.intermediate, config.mlp_bias),
            attention_post_norm=self._post_norm(prefix + "post_attention_layernorm"),
            mlp_post_norm=self._post_norm(prefix + "post_feedforward_layernorm"),
        )

    def _attention(self, name: str, queries: int, keys: int) -> "_Attention":
        config = self._config
        return _Attention(
            self._linear(
                [(name + "q_proj", queries), (name + "k_proj", keys), (name + "v_proj", keys)],
                config.hidden,
                config.attention_bias,
            ),
            self._head_norms(name) if config.qk_norm else None,
            self._linear([(name + "o_proj", config.hidden)], queries, config.attention_output_bias),
        )

    def _latent(self, name: str, latent: LatentConfig) -> "_Attention":
        config, wide = self._config, torch.float32
        heads, hidden, of_head = config.heads, config.hidden, latent.nope_dim + latent.rope_dim
        inputs = latent.query_rank or hidden
        query = "q_b_proj.weight" if latent.query_rank else "q_proj.weight"
        made = absorbed(
            latent,
            heads,
            self._tensor(name + query, (heads * of_head, inputs), wide),
            self._tensor(name + "kv_a_proj_with_mqa.weight", (latent.rank + latent.rope_dim, hidden), wide),
            self._tensor(name + "kv_b_proj.weight", (heads * (latent.nope_dim + latent.value_dim), latent.rank), wide),
            self._tensor(name + "o_proj.weight", (hidden, heads * latent.value_dim), wide),
        )
        norm, output = self._norm(name + "kv_a_layernorm", latent.rank, wide), self._packed(made.output)
        if latent.query_rank is None:
            return _Attention(self._packed(torch.cat([made.queries, made.latent])), norm, output)
        factors = QueryFactors(
            self._linear([(name + "q_a_proj", latent.query_rank)], hidden, False),
            self._norm(name + "q_a_layernorm", latent.query_rank),
            self._packed(made.queries),
        )
        return _Attention(self._packed(made.latent), norm, output, factors)

    def _packed(self, weight: torch.Tensor) -> PackedLinear:
        return self._backend.pack(weight.to(self._dtype), None)

    def _linear(self, parts: list[tuple[str, int]], inputs: int, with_bias: bool) -> PackedLinear:
        return self._backend.pack(*self._joined(parts, inputs, with_bias))

    def _joined(self, parts: list[tuple[str, int]], inputs: int, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Several matrices with one input become one product."""
        weight = torch.cat([self._tensor(name + ".weight", (outputs, inputs)) for name, outputs in parts])
        bias = torch.cat([self._tensor(name + ".bias", (outputs,)) for name, outputs in parts]) if with_bias else None
        return weight, bias

    def _head_norms(self, attention: str) -> torch.Tensor:
        config = self._config
        query = self._norm(attention + "q_norm", config.head_dim, torch.float32)
        key = self._norm(attention + "k_norm", config.head_dim, torch.float32)
        return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])

    def _post_norm(self, name: str) -> torch.Tensor | None:
        return self._norm(name, self._config.hidden) if self._config.post_norms else None

    def _norm(self, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight of a norm, in the dtype of the others where none is asked for."""
        if self._config.norms_add_one:
            # In float32, so that a small weight is not lost beside the one.
            weight = self._tensor(name + ".weight", (width,), torch.float32) + 1.0
        else:
            weight = self._tensor(name + ".weight", (width,))
        return weight.to(dtype or self._dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self._names:
            raise WeightsError(f"tensor {name} is missing; the files do not hold the model that their configuration describes")
        if self._source.shape(name) != shape:
            raise WeightsError(f"tensor {name} has shape {list(self._source.shape(name))}; the configuration says {list(shape)}")
        self._read_names.add(name)
        return self._source.read(name, dtype or self._dtype).to(self._device)

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

"""The shape of a model, whatever file it came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from models.rope import RopeConfig, RopeKind
from text.errors import UnsupportedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "deepseek_v2", "deepseek_v3")

# A file that claims more is broken or hostile: sizes decide how much memory is taken.
LIMITS = {
    "layers": 1024,
    "hidden": 1 << 17,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": 1024,
    "intermediate": 1 << 20,
    "vocabulary_size": 1 << 21,
    "context_tokens": 1 << 24,
}


class Heads(Protocol):
    """What every kind of shape says about attention."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def check_sizes(config: Heads, names: Sequence[str]) -> None:
    """The fields of these names against LIMITS, and the heads with one another. Raises UnsupportedModel naming the field."""
    for name in names:
        value, limit = getattr(config, name), LIMITS[name]
        if not 1 <= value <= limit:
            raise UnsupportedModel(f"The model's {name} is {value}; 1 to {limit} are supported.")
    if config.heads % config.kv_heads:
        raise UnsupportedModel(f"The model's heads ({config.heads}) are no multiple of its kv_heads ({config.kv_heads}).")
    if config.head_dim % 2:
        raise UnsupportedModel(f"The model's head_dim is {config.head_dim}; rotary positions need an even number.")


class Activation(Enum):
    """What the gate of an MLP goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over one vector a token (multi-head latent attention, https://arxiv.org/abs/2405.04434 section 2.1).

    A token's vector is `rank` values, normalised, that keys and values of all heads are made of, and `rope_dim` values that
    carry its position. Of a query head nope_dim values meet the first part and rope_dim the second; a value head has value_dim.
    query_rank: of the two factors that make queries; None where they are one matrix.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    rope_interleaved: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

    `rope_interleaved`: a GGUF file of architecture llama stores the rows of q and k permuted, so that rotation pairs are
    neighbours (2i, 2i+1) inside a head; elsewhere pairs are (i, i + head_dim/2). Whoever loads such weights (and biases of
    q and k, which are permuted too) undoes the permutation or rotates neighbours; both give the same scores.

    `vocabulary_size` is the number of logits. Ends of output: text.Tokenizer.eos_ids, which knows more than `eos_ids` here.

    `sliding_window`: tokens that a query sees in every layer that is not in `full_layers`, itself included; None when all
    layers see all. `window_rope`: rotary positions of the layers with a window, where they are other ones.
    `query_scale`: what scores are multiplied with; None: head_dim ** -0.5. `post_norms`: attention and MLP are normalised again
    before they are added. `norms_add_one`: the file holds the weights of norms less one. `latent`: attention over latent vectors;
    kv_heads is 1 then, and head_dim the size of such a vector.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary_size: int
    context_tokens: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool  # on the q, k and v projections
    attention_output_bias: bool  # on the projection after attention
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    rope_interleaved: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    full_layers: frozenset[int] = frozenset()
    window_rope: RopeConfig | None = None
    activation: Activation = Activation.SILU
    query_scale: float | None = None
    embedding_scale: float = 1.0
    post_norms: bool = False
    norms_add_one: bool = False
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        """Raises UnsupportedModel naming the field and the limit."""
        check_sizes(self, tuple(LIMITS))
        if not 0 < self.rms_eps < 1:
            raise UnsupportedModel(f"The model's rms_eps is {self.rms_eps}; it must be between 0 and 1.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UnsupportedModel(f"The model's sliding_window is {self.sliding_window}; it must be at least 1.")
        self._check_rope(self.rope)
        if self.window_rope is not None:
            self._check_rope(self.window_rope)

    def window(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, itself included; None when it sees all."""
        return None if layer in self.full_layers else self.sliding_window

    def _check_rope(self, rope: RopeConfig) -> None:
        if not rope.theta > 1:
            raise UnsupportedModel(f"The model's rope theta is {rope.theta}; it must be over 1.")
        if not rope.factor >= 1:
            raise UnsupportedModel(f"The model's rope factor is {rope.factor}; it must be at least 1.")
        if rope.kind is RopeKind.DIVISORS and len(rope.divisors) != self.head_dim // 2:
            raise UnsupportedModel(
                f"The model has {len(rope.divisors)} rope divisors; head_dim {self.head_dim} needs {self.head_dim // 2}."
            )
        if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN) and rope.original_context_tokens < 1:
            raise UnsupportedModel(
                f"The model's rope kind {rope.kind.value} needs the original context length; the file has none."
            )


def window_or_none(window: int | None, context_tokens: int) -> int | None:
    """A window as wide as the context is none."""
    return window if window and window < context_tokens else None


def full_layers(kinds: Sequence[str]) -> frozenset[int]:
    """The layers that see everything, of a model that lists a kind for each layer. Raises UnsupportedModel for other kinds."""
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModel(
            f"The model has layers of kind {', '.join(other)}; full_attention and sliding_attention are supported."
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")

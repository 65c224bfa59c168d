"""The shape of a model, whatever file it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.rope import RopeConfig, RopeKind
from text.errors import UnsupportedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    `rope_interleaved`: a GGUF file of architecture llama stores the rows of q and k permuted, so that rotation pairs are
    neighbours (2i, 2i+1) inside a head; elsewhere pairs are (i, i + head_dim/2). Whoever loads such weights (and biases of
    q and k, which are permuted too) undoes the permutation or rotates neighbours; both give the same scores.

    `vocabulary_size` is the number of logits. Ends of output: text.Tokenizer.eos_ids, which knows more than `eos_ids` here.
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
    sliding_window: int | None  # tokens that a query sees, itself included; None when it sees all
    rope_interleaved: bool
    bos_id: int | None
    eos_ids: frozenset[int]

    def __post_init__(self) -> None:
        """Raises UnsupportedModel naming the field and the limit."""
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise UnsupportedModel(f"The model's {name} is {value}; 1 to {limit} are supported.")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"The model's heads ({self.heads}) are no multiple of its kv_heads ({self.kv_heads}).")
        if self.head_dim % 2:
            raise UnsupportedModel(f"The model's head_dim is {self.head_dim}; rotary positions need an even number.")
        if not 0 < self.rms_eps < 1:
            raise UnsupportedModel(f"The model's rms_eps is {self.rms_eps}; it must be between 0 and 1.")
        self._check_rope()

    def _check_rope(self) -> None:
        rope = self.rope
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


def one_window(kinds: Sequence[str], window: int | None) -> int | None:
    """The window of a model that lists a kind for each layer. Raises UnsupportedModel when layers differ."""
    different = sorted(set(kinds))
    if different == ["full_attention"] or not different:
        return None
    if different == ["sliding_attention"]:
        return window
    raise UnsupportedModel(f"The model's layers differ in attention ({', '.join(different)}); all must be of one kind.")

"""ModelConfig out of a GGUF file's header (field names: GGUF specification)."""

from collections.abc import Collection
from dataclasses import replace

from models.config import Activation, ModelConfig, window_or_none
from models.gguf_header import GgufHeader
from models.rope import RopeConfig, RopeKind, yarn_attention_factor
from text.errors import UnsupportedModel
from text.gguf_fields import GgufFields

# GGUF files of Mistral models call themselves llama.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_REFUSED_SCALES = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

# What llama.cpp knows of Gemma 3 where the file does not say it: every so many layers one sees everything, the others turn
# positions by a base of their own, and the largest model scales its scores in another way.
_GEMMA3_PATTERN = 6
_GEMMA3_WINDOW_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62


def from_gguf(header: GgufHeader) -> ModelConfig:
    """Raises UnsupportedModel, naming the field, for whatever the engine would run wrongly."""
    fields = GgufFields(header.metadata)
    architecture = fields.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"The GGUF file's architecture is {architecture!r}; {', '.join(GGUF_ARCHITECTURES)} are supported "
            "(Mistral's files say llama)."
        )
    _refuse_features(fields, architecture)
    tensors = header.tensors.keys()
    hidden = fields.integer(f"{architecture}.embedding_length")
    heads = fields.integer(f"{architecture}.attention.head_count")
    if heads < 1:
        raise UnsupportedModel(f"{architecture}.attention.head_count is {heads}; it must be at least 1.")
    head_dim = fields.integer(f"{architecture}.attention.key_length", hidden // heads)
    _check_head(fields, architecture, head_dim)
    context_tokens = fields.integer(f"{architecture}.context_length")
    window = fields.integer(f"{architecture}.attention.sliding_window", 0)
    bos, eos = _ids(fields)
    config = ModelConfig(
        architecture=architecture,
        layers=fields.integer(f"{architecture}.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer(f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=fields.integer(f"{architecture}.feed_forward_length"),
        vocabulary_size=_vocabulary_size(header),
        context_tokens=context_tokens,
        rms_eps=fields.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, architecture, header.rope_divisors, context_tokens),
        tie_embeddings="output.weight" not in tensors,
        attention_bias=_has(tensors, "attn_q.bias"),
        attention_output_bias=_has(tensors, "attn_output.bias"),
        mlp_bias=_has(tensors, "ffn_down.bias"),
        qk_norm=_has(tensors, "attn_q_norm.weight"),
        sliding_window=window_or_none(window, context_tokens),
        rope_interleaved=architecture == "llama",
        bos_id=bos,
        eos_ids=eos,
    )
    return _with_gemma3(config, fields, window) if architecture == "gemma3" else config


def _with_gemma3(config: ModelConfig, fields: GgufFields, window: int) -> ModelConfig:
    """The converter has added the one to the weights of norms that the original files lack."""
    if window < 1:
        raise UnsupportedModel(f"gemma3.attention.sliding_window is {window}; it must be at least 1.")
    pattern = fields.integer("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if pattern < 1:
        raise UnsupportedModel(f"gemma3.attention.sliding_window_pattern is {pattern}; it must be at least 1.")
    largest = config.layers == _GEMMA3_27B_LAYERS
    return replace(
        config,
        sliding_window=window,
        full_layers=frozenset(layer for layer in range(config.layers) if (layer + 1) % pattern == 0),
        window_rope=RopeConfig(RopeKind.DEFAULT, fields.number("gemma3.rope.freq_base_swa", _GEMMA3_WINDOW_THETA)),
        activation=Activation.GELU_TANH,
        query_scale=(config.hidden / config.heads) ** -0.5 if largest else None,
        embedding_scale=config.hidden**0.5,
        post_norms=True,
    )


def _vocabulary_size(header: GgufHeader) -> int:
    """Rows of the embedding: the width of the logits, which can be more than the tokenizer has ids."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel("The GGUF file has no matrix token_embd.weight; it holds no language model.")
    return embedding.shape[0]


def _has(tensors: Collection[str], name: str) -> bool:
    return f"blk.0.{name}" in tensors


def _refuse_features(fields: GgufFields, architecture: str) -> None:
    if fields.integer(f"{architecture}.expert_count", 0):
        raise UnsupportedModel("The model is a mixture of experts (expert_count over 0), which is not supported.")
    for name in _REFUSED_SCALES:
        if fields.number(f"{architecture}.{name}", 0.0):
            raise UnsupportedModel(f"The GGUF field {architecture}.{name} is set; models with that scaling are not supported.")


def _check_head(fields: GgufFields, architecture: str, head_dim: int) -> None:
    value_dim = fields.integer(f"{architecture}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModel(f"The model's value_length is {value_dim} and its key_length {head_dim}; they must be equal.")
    rotary = fields.integer(f"{architecture}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnsupportedModel(
            f"The model rotates {rotary} of {head_dim} dimensions (rope.dimension_count); all must be rotated."
        )


def _rope(fields: GgufFields, architecture: str, divisors: tuple[float, ...], context_tokens: int) -> RopeConfig:
    prefix = f"{architecture}.rope"
    theta = fields.number(f"{prefix}.freq_base", 10000.0)
    kind = fields.text(f"{prefix}.scaling.type", "none")
    if divisors:
        if kind not in ("none", "linear") or fields.number(f"{prefix}.scaling.factor", 1.0) not in (0.0, 1.0):
            raise UnsupportedModel(f"The GGUF file has rope_freqs.weight and rope scaling {kind!r} too; only one is supported.")
        return RopeConfig(RopeKind.DIVISORS, theta, divisors=divisors)
    factor = fields.number(f"{prefix}.scaling.factor", 1.0) or 1.0
    if kind == "none":  # older files state a linear stretch in a field of its own
        kind, factor = "linear", fields.number(f"{prefix}.scale_linear", 1.0)
    if kind == "linear":
        return RopeConfig(RopeKind.DEFAULT if factor == 1.0 else RopeKind.LINEAR, theta, factor)
    if kind != "yarn":
        raise UnsupportedModel(
            f"The GGUF file's rope scaling is {kind!r} ({prefix}.scaling.type); none, linear and yarn are supported."
        )
    return RopeConfig(
        RopeKind.YARN,
        theta,
        factor,
        original_context_tokens=fields.integer(f"{prefix}.scaling.original_context_length", context_tokens),
        beta_fast=fields.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor) * fields.number(f"{prefix}.scaling.yarn_attn_factor", 1.0),
    )


def _ids(fields: GgufFields) -> tuple[int | None, frozenset[int]]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = frozenset(fields.integer(f"tokenizer.ggml.{name}") for name in names if fields.has(f"tokenizer.ggml.{name}"))
    bos = fields.integer("tokenizer.ggml.bos_token_id") if fields.has("tokenizer.ggml.bos_token_id") else None
    return bos, eos

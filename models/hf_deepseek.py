"""What the config.json of a DeepSeek V2 or V3 model says beside that of a Llama (source: transformers' configurations)."""

from dataclasses import replace

from models.config import LatentConfig, ModelConfig
from models.hf_fields import HfFields
from models.rope import RopeKind
from text.errors import UnsupportedModel

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
# Of the norms inside attention, which the file does not state.
INNER_RMS_EPS = 1e-6
SIZE_MAX = 4096


def with_latent(config: ModelConfig, fields: HfFields) -> ModelConfig:
    """The configuration with attention over latent vectors. Raises UnsupportedModel."""
    experts, dense = fields.integer("n_routed_experts", 1), fields.integer("first_k_dense_replace", 0)
    if experts and dense < config.layers:
        raise UnsupportedModel(
            f"first_k_dense_replace in {fields.where} is {dense} of {config.layers} layers; "
            "mixtures of experts are not supported."
        )
    if fields.flag("attention_bias", False):
        raise UnsupportedModel(f"attention_bias in {fields.where} is set; it is not supported for {config.architecture}.")
    if config.rms_eps != INNER_RMS_EPS:
        raise UnsupportedModel(f"rms_norm_eps in {fields.where} is {config.rms_eps}; {INNER_RMS_EPS} is supported.")
    if config.rope.kind is not RopeKind.DEFAULT:
        raise UnsupportedModel(
            f"rope_type in {fields.where} is {config.rope.kind.value}; only default is supported for {config.architecture}."
        )
    latent = LatentConfig(
        rank=_size(fields, "kv_lora_rank"),
        nope_dim=_size(fields, "qk_nope_head_dim"),
        rope_dim=_size(fields, "qk_rope_head_dim"),
        value_dim=_size(fields, "v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else _size(fields, "q_lora_rank"),
        rope_interleaved=fields.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise UnsupportedModel(f"qk_rope_head_dim in {fields.where} is {latent.rope_dim}; rotary positions need an even number.")
    return replace(
        config,
        kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        query_scale=(latent.nope_dim + latent.rope_dim) ** -0.5,
        latent=latent,
    )


def _size(fields: HfFields, name: str) -> int:
    value = fields.integer(name)
    if not 1 <= value <= SIZE_MAX:
        raise UnsupportedModel(f"{name} in {fields.where} is {value}; 1 to {SIZE_MAX} are supported.")
    return value

"""What the config.json of a Gemma 3 text model says beside that of a Llama (source: transformers' Gemma3TextConfig)."""

from collections.abc import Mapping
from dataclasses import replace

from models.config import Activation, ModelConfig, full_layers
from models.hf_fields import HfFields
from models.hf_rope import rope_of
from text.errors import UnsupportedModel

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = "gemma3"
HEAD_DIM = 256
ACTIVATION = "gelu_pytorch_tanh"
_QUERY_SCALAR = 256
_WINDOW = 4096
_PATTERN = 6
_THETA = 1_000_000.0
_WINDOW_THETA = 10_000.0


def with_gemma3(config: ModelConfig, fields: HfFields) -> ModelConfig:
    """The configuration with all that Gemma 3 has beside a Llama's. Raises UnsupportedModel."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(name) is not None:
            raise UnsupportedModel(f"{name} in {fields.where} is set; soft caps are not supported.")
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(f"use_bidirectional_attention in {fields.where} is set; only causal attention is supported.")
    scalar = fields.number("query_pre_attn_scalar", _QUERY_SCALAR)
    if not scalar > 0:
        raise UnsupportedModel(f"query_pre_attn_scalar in {fields.where} is {scalar}; it must be over 0.")
    whole, window = _ropes(fields)
    return replace(
        config,
        architecture=ARCHITECTURE,
        rope=rope_of(fields, whole, _THETA, config.context_tokens),
        window_rope=rope_of(fields, window, _WINDOW_THETA, config.context_tokens),
        # Kept where it is as wide as the context, too: the layers that have it turn positions in another way.
        sliding_window=fields.integer("sliding_window", _WINDOW),
        full_layers=_full_layers(fields, config.layers),
        activation=Activation.GELU_TANH,
        query_scale=scalar**-0.5,
        embedding_scale=config.hidden**0.5,
        post_norms=True,
        norms_add_one=True,
    )


def _full_layers(fields: HfFields, layers: int) -> frozenset[int]:
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise UnsupportedModel(f"layer_types in {fields.where} has {len(kinds)} entries for {layers} layers.")
        return full_layers([str(kind) for kind in kinds])
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", _PATTERN))
    if pattern < 1:
        raise UnsupportedModel(f"sliding_window_pattern in {fields.where} is {pattern}; it must be at least 1.")
    return frozenset(layer for layer in range(layers) if (layer + 1) % pattern == 0)


def _ropes(fields: HfFields) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The settings of full layers and of those with a window: one object for each (transformers 5), or fields side by side."""
    stated = fields.get("rope_parameters")
    if isinstance(stated, dict):
        return fields.settings(stated.get("full_attention")), fields.settings(stated.get("sliding_attention"))
    whole = {"rope_theta": fields.number("rope_theta", _THETA), **fields.settings(fields.get("rope_scaling"))}
    return whole, {"rope_theta": fields.number("rope_local_base_freq", _WINDOW_THETA)}

"""The shape of a model out of a Hugging Face config.json, in the older spelling (rope_theta, rope_scaling) and that of
transformers 5 (rope_parameters)."""

import json
from collections.abc import Mapping
from pathlib import Path

from models import hf_deepseek, hf_gemma3
from models.config import ARCHITECTURES, ModelConfig, full_layers, window_or_none
from models.hf_fields import HfFields, ids_of, refuse_quantised
from models.hf_rope import rope_of
from models.module_config import ModuleConfig, module_config
from text.errors import UnsupportedModel

# What transformers takes when the file leaves a value out.
_DEFAULT_THETA = 10000.0
_DEFAULT_RMS_EPS = 1e-6
_DEFAULT_QWEN_MAX_WINDOW_LAYERS = 28
# Architectures whose heads are normalised, too.
_DEFAULT_HEAD_DIM = {"qwen3": 128, hf_gemma3.MODEL_TYPE: hf_gemma3.HEAD_DIM}


def from_hf_json(path: Path) -> ModelConfig | ModuleConfig:
    """From the file config.json. Raises UnsupportedModel for whatever the engine would run wrongly."""
    generation = path.parent / "generation_config.json"
    more_eos = ids_of(_object(generation).get("eos_token_id")) if generation.is_file() else frozenset()
    return from_hf_values(_object(path), str(path), more_eos)


def _object(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object.")
    return values


def from_hf_values(
    values: Mapping[str, object], where: str = "config.json", more_eos: frozenset[int] = frozenset()
) -> ModelConfig | ModuleConfig:
    """From the parsed object. `more_eos` are end ids that another file declares. A ModuleConfig where model_type is none of
    ARCHITECTURES."""
    fields = HfFields(values, where)
    architecture = values.get("model_type")
    if architecture not in ARCHITECTURES:
        return module_config(fields, more_eos)
    _refuse_features(fields)
    config = _llama_like(fields, str(architecture), more_eos)
    if architecture in hf_deepseek.MODEL_TYPES:
        return hf_deepseek.with_latent(config, fields)
    return hf_gemma3.with_gemma3(config, fields) if architecture == hf_gemma3.MODEL_TYPE else config


def _llama_like(config: HfFields, architecture: str, more_eos: frozenset[int]) -> ModelConfig:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1:
        raise UnsupportedModel(f"num_attention_heads in {config.where} is {heads}; it must be at least 1.")
    context_tokens, layers = config.integer("max_position_embeddings"), config.integer("num_hidden_layers")
    flagged = config.flag("attention_bias", False) if architecture in ("llama", "qwen3", hf_gemma3.MODEL_TYPE) else False
    full, window = _windows(config, architecture, layers)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM.get(architecture, hidden // heads)),
        intermediate=config.integer("intermediate_size"),
        vocabulary_size=config.integer("vocab_size"),
        context_tokens=context_tokens,
        rms_eps=config.number("rms_norm_eps", _DEFAULT_RMS_EPS),
        rope=rope_of(config, _rope_settings(config), config.number("rope_theta", _DEFAULT_THETA), context_tokens),
        tie_embeddings=config.flag("tie_word_embeddings", architecture == hf_gemma3.MODEL_TYPE),
        attention_bias=flagged or architecture == "qwen2",
        attention_output_bias=flagged,
        mlp_bias=config.flag("mlp_bias", False) if architecture == "llama" else False,
        qk_norm=architecture in _DEFAULT_HEAD_DIM,
        sliding_window=window_or_none(window, context_tokens),
        full_layers=full,
        rope_interleaved=False,
        bos_id=next(iter(ids_of(config.get("bos_token_id"))), None),
        eos_ids=ids_of(config.get("eos_token_id")) | more_eos,
    )


def _refuse_features(config: HfFields) -> None:
    gemma = config.get("model_type") == hf_gemma3.MODEL_TYPE
    field, expected = ("hidden_activation", hf_gemma3.ACTIVATION) if gemma else ("hidden_act", "silu")
    activation = config.values.get(field, expected)
    if activation != expected:
        raise UnsupportedModel(f"{field} in {config.where} is {activation!r}; {expected} is supported.")
    refuse_quantised(config)
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor in {config.where} is not 1; all dimensions must be rotated.")
    for field in ("num_local_experts", "num_experts"):
        if config.integer(field, 0):
            raise UnsupportedModel(f"{field} in {config.where} is set; mixtures of experts are not supported.")


def _rope_settings(config: HfFields) -> Mapping[str, object]:
    return config.settings(config.get("rope_parameters") or config.get("rope_scaling"))


def _windows(config: HfFields, architecture: str, layers: int) -> tuple[frozenset[int], int | None]:
    """The layers that see everything beside others that do not, and the window of those; None when there is none."""
    if config.get("sliding_window") is None:
        return frozenset(), None
    window = config.integer("sliding_window")
    if architecture == "mistral":
        return frozenset(), window
    if architecture not in ("qwen2", "qwen3") or not config.flag("use_sliding_window", False):
        return frozenset(), None
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        first = config.integer("max_window_layers", _DEFAULT_QWEN_MAX_WINDOW_LAYERS)
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    full = full_layers([str(kind) for kind in kinds])
    return (frozenset(), None) if len(full) == layers else (full, window)

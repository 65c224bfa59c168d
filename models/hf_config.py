"""ModelConfig out of a Hugging Face config.json, in the older spelling (rope_theta, rope_scaling) and that of transformers 5
(rope_parameters)."""

import json
from collections.abc import Mapping
from pathlib import Path

from models.config import ARCHITECTURES, ModelConfig, one_window, window_or_none
from models.rope import RopeConfig, RopeKind, yarn_attention_factor
from text.errors import UnsupportedModel

# What transformers takes when the file leaves a value out.
_DEFAULT_THETA = 10000.0
_DEFAULT_RMS_EPS = 1e-6
_DEFAULT_QWEN_MAX_WINDOW_LAYERS = 28


class _Config:
    """Typed reading of a JSON object; `where` is named in errors."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, field: str) -> object:
        return self.values.get(field)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(field, value, "an integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, value, "a number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def _wrong(self, field: str, value: object, wanted: str) -> UnsupportedModel:
        if value is None:
            return UnsupportedModel(f"{self.where} has no {field}; it must be {wanted}.")
        return UnsupportedModel(f"{field} in {self.where} is {value!r:.60}; it must be {wanted}.")


def from_hf_json(path: Path) -> ModelConfig:
    """From the file config.json. Raises UnsupportedModel for whatever the engine would run wrongly."""
    generation = path.parent / "generation_config.json"
    more_eos = _ids(_object(generation).get("eos_token_id")) if generation.is_file() else frozenset()
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
) -> ModelConfig:
    """From the parsed object. `more_eos` are end ids that another file declares."""
    config = _Config(values, where)
    architecture = values.get("model_type")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"model_type in {where} is {architecture!r}; {', '.join(ARCHITECTURES)} are supported.")
    architecture = str(architecture)
    _refuse_features(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1:
        raise UnsupportedModel(f"num_attention_heads in {where} is {heads}; it must be at least 1.")
    context_tokens = config.integer("max_position_embeddings")
    flagged = config.flag("attention_bias", False) if architecture in ("llama", "qwen3") else False
    return ModelConfig(
        architecture=architecture,
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", 128 if architecture == "qwen3" else hidden // heads),
        intermediate=config.integer("intermediate_size"),
        vocabulary_size=config.integer("vocab_size"),
        context_tokens=context_tokens,
        rms_eps=config.number("rms_norm_eps", _DEFAULT_RMS_EPS),
        rope=_rope(config, context_tokens),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=flagged or architecture == "qwen2",
        attention_output_bias=flagged,
        mlp_bias=config.flag("mlp_bias", False) if architecture == "llama" else False,
        qk_norm=architecture == "qwen3",
        sliding_window=window_or_none(_window(config, architecture), context_tokens),
        rope_interleaved=False,
        bos_id=next(iter(_ids(values.get("bos_token_id"))), None),
        eos_ids=_ids(values.get("eos_token_id")) | more_eos,
    )


def _refuse_features(config: _Config) -> None:
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act in {config.where} is {activation!r}; silu is supported.")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{config.where} has a quantization_config; use the model's unquantised weights or a GGUF file of it."
        )
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor in {config.where} is not 1; all dimensions must be rotated.")
    for field in ("num_local_experts", "num_experts"):
        if config.integer(field, 0):
            raise UnsupportedModel(f"{field} in {config.where} is set; mixtures of experts are not supported.")


def _window(config: _Config, architecture: str) -> int | None:
    """Tokens of the sliding window; None when there is none."""
    if config.get("sliding_window") is None:
        return None
    window = config.integer("sliding_window")
    if architecture == "mistral":
        return window
    if architecture == "llama" or not config.flag("use_sliding_window", False):
        return None
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return one_window([str(kind) for kind in kinds], window)
    layers, full = config.integer("num_hidden_layers"), config.integer("max_window_layers", _DEFAULT_QWEN_MAX_WINDOW_LAYERS)
    return one_window(["full_attention" if layer < full else "sliding_attention" for layer in range(layers)], window)


def _rope(config: _Config, context_tokens: int) -> RopeConfig:
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"The rope settings in {config.where} must be an object.")
    rope = _Config(raw, f"the rope settings of {config.where}")
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor in {rope.where} is not 1; all dimensions must be rotated.")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins beyond max_position_embeddings, and longer sequences are refused: it never shows.
        return RopeConfig(RopeKind.DEFAULT, theta)
    if kind == "linear":
        return RopeConfig(RopeKind.LINEAR, theta, rope.number("factor"))
    original = rope.integer(
        "original_max_position_embeddings", config.integer("original_max_position_embeddings", context_tokens)
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not 0 < low < high:
            raise UnsupportedModel(f"low_freq_factor {low} and high_freq_factor {high} in {rope.where} must rise from over 0.")
        return RopeConfig(RopeKind.LLAMA3, theta, rope.number("factor"), original, low, high)
    if kind == "yarn":
        return _yarn(rope, theta, original, context_tokens)
    raise UnsupportedModel(f"rope_type in {rope.where} is {kind!r}; default, linear, dynamic, llama3 and yarn are supported.")


def _yarn(rope: _Config, theta: float, original: int, context_tokens: int) -> RopeConfig:
    factor = rope.number("factor", context_tokens / original if original else 1.0)
    default = yarn_attention_factor(factor, rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0))
    return RopeConfig(
        RopeKind.YARN,
        theta,
        factor,
        original_context_tokens=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default),
    )


def _ids(value: object) -> frozenset[int]:
    """Ids of a field that is one id, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)

"""Rotary positions out of a config.json, in the older spelling and in that of transformers 5."""

from collections.abc import Mapping

from models.hf_fields import HfFields
from models.rope import RopeConfig, RopeKind, yarn_attention_factor
from text.errors import UnsupportedModel


def rope_of(config: HfFields, settings: Mapping[str, object], theta: float, context_tokens: int) -> RopeConfig:
    """From an object with rope settings, of whatever layers. `theta`: where it says none. Raises UnsupportedModel."""
    rope = HfFields(settings, f"the rope settings of {config.where}")
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor in {rope.where} is not 1; all dimensions must be rotated.")
    kind = settings.get("rope_type", settings.get("type", "default"))
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


def _yarn(rope: HfFields, theta: float, original: int, context_tokens: int) -> RopeConfig:
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

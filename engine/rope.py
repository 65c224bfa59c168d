"""Rotary position embedding: the table of cosines and sines, with the scalings that long-context models are trained with."""

import math

import torch

from models.rope import RopeConfig, RopeKind


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines of the head_dim/2 angles, then their sines.

    Dimension i of a head is rotated together with dimension i + head_dim/2 (the order of Hugging Face checkpoints).
    Angles are products of float32 values, as in the models' training code: a more exact product would be a different model.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope, head_dim)[None, :]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return table.mul_(rope.attention_factor) if rope.kind is RopeKind.YARN else table


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case RopeKind.DEFAULT:
            return base
        case RopeKind.LINEAR:
            return base / rope.factor
        case RopeKind.DIVISORS:
            return base / torch.tensor(rope.divisors, dtype=torch.float32)
        case RopeKind.LLAMA3:
            return _llama3(rope, base)
        case RopeKind.YARN:
            return _yarn(rope, base, head_dim)


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.

    Source: the reference code published with Llama 3.1 (apply_scaling).
    """
    turns = rope.original_context_tokens * base / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / rope.factor + kept * base


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071 section 3.2: rarely turning dimensions are interpolated, others kept."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return base / rope.factor * interpolated + base * (1 - interpolated)

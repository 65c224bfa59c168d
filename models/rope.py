"""How positions turn queries and keys, as a value. The engine computes the frequencies."""

import math
from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    """Rules for stretching rotary frequencies; base frequencies are theta ** (-2i / head_dim)."""

    DEFAULT = "default"
    LINEAR = "linear"  # all divided by factor
    LLAMA3 = "llama3"  # long waves divided by factor, short ones kept, smooth between
    YARN = "yarn"  # Peng et al., "YaRN", 2023
    DIVISORS = "divisors"  # each divided by its own number, from the file


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Fields beside `kind` and `theta` matter only to the kinds named.

    `attention_factor` (YARN) is final: cos and sin are multiplied by it. `divisors` (DIVISORS) has head_dim / 2 entries.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0  # LINEAR, LLAMA3, YARN
    original_context_tokens: int = 0  # LLAMA3, YARN
    low_frequency_factor: float = 1.0  # LLAMA3
    high_frequency_factor: float = 4.0  # LLAMA3
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    truncate: bool = True  # YARN: whether the ramp's ends are rounded to whole dimensions
    attention_factor: float = 1.0  # YARN
    divisors: tuple[float, ...] = ()  # DIVISORS


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's default scale of cos and sin: 0.1 ln(factor) + 1, or the quotient of two such when both scales are given."""

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)

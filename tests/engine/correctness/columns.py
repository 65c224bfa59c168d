"""The columns: what computes, and what an output is compared with there."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.quantisation import WeightQuantisation


class Comparison(Enum):
    """How the tokens of a column's cells are judged. Log-probabilities are near the reference's in all of them."""

    REFERENCE = "ref"
    """They are the reference's."""
    ALONE = "alone"
    """They and their log-probabilities are, bit for bit, those of the same request alone on the same backend."""
    NEAR = "near"
    """Each is what the reference chooses there, or as good as that within rounding."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of tests.engine.tiny_models, with changes to its configuration."""

    name: str
    variant: str
    about: str
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """A backend in one dtype. page_tokens: of every KV group. weights: how matrices are kept, as in weight_quantisation."""

    name: str
    backend: str
    dtype: str
    page_tokens: int
    comparison: Comparison
    weights: WeightQuantisation = WeightQuantisation.OFF


@dataclass(frozen=True, slots=True)
class Column:
    """One family on one engine."""

    family: Family
    engine: Engine

    @property
    def name(self) -> str:
        """Unique among the columns."""
        return f"{self.family.name} {self.engine.name}"


FAMILIES = (
    Family("llama", "llama", "grouped heads", (("head_dim", 32),)),
    Family("qwen3", "qwen3", "norms on heads, head size apart from the hidden size", (("head_dim", 32),)),
    Family("mistral", "mistral-window", "a sliding window in every layer"),
    Family("gemma3", "gemma3", "a sliding window in some layers: two KV groups"),
    Family("deepseek", "deepseek-v3", "latent attention: one vector a token"),
)
ENGINES = (
    Engine("f32", "torch", "float32", 4, Comparison.REFERENCE),
    Engine("b16", "torch", "bfloat16", 4, Comparison.NEAR),
    Engine("nat", "native", "bfloat16", 16, Comparison.ALONE),
    Engine("f8", "torch", "float32", 4, Comparison.REFERENCE, WeightQuantisation.INT8),
    Engine("n8", "native", "bfloat16", 16, Comparison.ALONE, WeightQuantisation.INT8),
)
COLUMNS = tuple(Column(family, engine) for family in FAMILIES for engine in ENGINES)

#: Families that no adapter can change.
WITHOUT_ADAPTERS = ("deepseek",)

NO_NATIVE = "the native kernels have neither sliding windows nor latent attention; such models are computed by torch"
NO_DEQUANTISED = "products of matrices are kept as int8 there, and the reference has only the matrices themselves"


def excuse(column: Column) -> str:
    """Why nothing can be computed in a column, or be compared; empty when something can."""
    if column.engine.backend == "native" and column.family.name in ("mistral", "gemma3", "deepseek"):
        return NO_NATIVE
    return NO_DEQUANTISED if column.engine.weights is not WeightQuantisation.OFF and column.family.name == "deepseek" else ""

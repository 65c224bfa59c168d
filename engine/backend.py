"""The port between the decoder and the code that computes: what a backend must do, and how one is chosen.

A backend is registered by name with the setups it can serve. At load the first fitting one is built, compared with the
plain reference on random data of the model's own geometry, and kept for the life of the runner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import LayerMarks
from engine.core_share import Loan
from engine.model_weights import LowRank, ModelWeights, PackedLinear
from engine.quantisation import WeightQuantisation
from engine.step import Ints, Step
from models.config import Activation

AUTO = "auto"


class BackendUnfit(RuntimeError):
    """A backend cannot run here: unknown name, missing instructions, or results that differ from the reference."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a backend is built for.

    pool: `dtype` [pages, layers, page_tokens, vectors, kv_heads, head_dim], contiguous: of one KV group. A model with several has
    a setup and a backend for each; products and norms are computed by the first one's.
    rope: float32 [positions, head_dim], cosines then sines (see engine.rope).
    latent_rank: with attention over latent vectors (kv_heads is 1), how many values of such a vector, its first, are normalised
    and make values; the others, as many as rope has columns, are rotated, in it and at the end of each query.
    window: tokens that a query sees, itself included; None when it sees all. score_scale: None is head_dim ** -0.5.
    quantisation: what packing makes of weights; a product of quantised ones is (x @ values.T) * scales + bias, summed in float32.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    pool: torch.Tensor
    rope: torch.Tensor
    window: int | None = None
    score_scale: float | None = None
    activation: Activation = Activation.SILU
    latent_rank: int | None = None
    quantisation: WeightQuantisation = WeightQuantisation.OFF

    @property
    def vectors(self) -> int:
        """What a token stores for each key head: key and value, or a latent that is both."""
        return 2 if self.latent_rank is None else 1

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def query_columns(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        return (self.heads + self.vectors * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class RowsUpdate:
    """What is added to the products of some rows: those of one adapter. rows: int64, ascending."""

    rows: Ints
    update: LowRank


class WholeStep(Protocol):
    """A decoder step as one call."""

    def __call__(self, step: Step, marks: LayerMarks | None, loan: Loan) -> torch.Tensor:
        """Write the KV of all rows, telling the marks; float32 logits [R, vocabulary] of step.logit_rows.

        loan: threads that it may use beside the backend's own, until they are recalled; the result is the same, bit for bit.
        """
        ...

    def part_seconds(self) -> Mapping[str, float]:
        """Seconds of all calls so far, by part of a step; from any thread, while a step runs too."""
        ...


class Backend(Protocol):
    """Computes the parts of a decoder step. T is the number of packed rows.

    `begin` comes first in a step, then layers in order. Sums of norms, softmax and dot products are float32.
    Arguments named `own_` may be overwritten; the result may share their memory.
    updates: added to a product before anything else is done with it. Rows without one have the bits that they have without any,
    and what a row's update adds does not depend on the others.
    """

    @property
    def name(self) -> str: ...

    @property
    def chunks_read_as_rows(self) -> bool:
        """Whether a row reads the same, bit for bit, in a chunk and as a row of its own: drafts are then computed as chunks."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [out, in] and bias [out], in the setup's dtype and device."""
        ...

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [2 * intermediate, in], gates then ups, for `gated`."""
        ...

    def pack_head(self, weight: torch.Tensor) -> PackedLinear:
        """The matrix [vocabulary, hidden] that makes logits."""
        ...

    def pack_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """down [rank, in], up [out, rank] in float32, on the setup's device, for `linear` and `linear_add`. Never quantised."""
        ...

    def pack_gate_up_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """up [2 * intermediate, rank], gates then ups, for `gated`."""
        ...

    def begin(self, step: Step) -> None:
        """Take in a step's integers and clear the pages it begins."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        """[T, in] to [T, out]."""
        ...

    def linear_add(
        self, x: torch.Tensor, packed: PackedLinear, own_residual: torch.Tensor, updates: Sequence[RowsUpdate] = ()
    ) -> torch.Tensor:
        """[T, in] to [T, out], added to own_residual [T, out]."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root mean square norm of [T, hidden] times weight."""
        ...

    def gated(self, x: torch.Tensor, gate_up: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        """[T, in] to activation(gate) * up, [T, intermediate]."""
        ...

    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        """own_qkv [T, qkv_columns]: rotate queries and keys, write keys and values to the pool, return it rotated.

        head_norms: float32 [heads + kv_heads, head_dim], weights of the norms on query and key heads before the rotation (Qwen3);
        [latent_rank], of the norm on latents.
        """
        ...

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the rotated rows over their pages; [T, query_columns], or [T, heads * latent_rank]."""
        ...

    def logits(self, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        """[R, hidden] to float32 [R, vocabulary]."""
        ...

    def whole_step(self, weights: ModelWeights) -> WholeStep | None:
        """All of the above for these weights as one call with the same results, bit for bit; None where there is no such call."""
        ...


@dataclass(frozen=True, slots=True)
class Registration:
    """A backend by name. Higher ranks are tried first by `auto`; `fits` says in advance whether a setup can be served."""

    name: str
    rank: int
    fits: Callable[[torch.device, torch.dtype], bool]
    build: Callable[[Setup], Backend]


class Registry:
    """The backends a process knows."""

    def __init__(self, registrations: tuple[Registration, ...]) -> None:
        self._by_name = {registration.name: registration for registration in registrations}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_name))

    def candidates(self, name: str, device: torch.device, dtype: torch.dtype) -> list[Registration]:
        """Registrations to try, best first: all that fit for `auto`, else the one named. Raises BackendUnfit."""
        if name == AUTO:
            fitting = [each for each in self._by_name.values() if each.fits(device, dtype)]
            return sorted(fitting, key=lambda each: each.rank, reverse=True)
        if name not in self._by_name:
            raise BackendUnfit(f"backend {name!r} is not known; choose {AUTO} or one of {', '.join(self.names)}")
        registration = self._by_name[name]
        if not registration.fits(device, dtype):
            raise BackendUnfit(f"backend {name!r} does not run {dtype} on {device}; choose {AUTO}")
        return [registration]

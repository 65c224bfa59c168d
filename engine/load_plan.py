"""What a decoder is loaded from and into, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.adapters import AdapterFolder
from engine.backend import Registry
from engine.batch import LayerMarks
from engine.core_share import NO_LOAN, Loan
from engine.kv_groups import KvGroup
from engine.quantisation import WeightQuantisation
from engine.slab import Slab
from engine.step import Step
from engine.weights import LoadProgress
from models.ref import ModelRef


class StepDecoder(Protocol):
    """Computes steps over the pages of one model."""

    @property
    def chunks_read_as_rows(self) -> bool:
        """See engine.backend.Backend."""
        ...

    @property
    def uses_loans(self) -> bool:
        """Whether it can use threads beside its own."""
        ...

    def forward(self, steps: Sequence[Step], marks: LayerMarks | None = None, loan: Loan = NO_LOAN) -> torch.Tensor:
        """Write the KV of all rows, telling the marks; float32 logits [R, vocabulary] of the rows that want them.

        steps: one for each KV group. loan: what may be used beside the decoder's own threads.
        """
        ...

    def part_seconds(self) -> Mapping[str, float]:
        """Where the time of steps went, by part of the model; empty where it is not counted."""
        ...


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """groups, slabs: one for each KV group. reach: positions that a sequence can get to. backend: its name, or `auto`."""

    ref: ModelRef
    device: torch.device
    dtype: torch.dtype
    groups: tuple[KvGroup, ...]
    slabs: tuple[Slab, ...]
    reach: int
    registry: Registry
    backend: str
    quantisation: WeightQuantisation
    progress: Callable[[LoadProgress], None] | None
    adapters: tuple[AdapterFolder, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder, and the name of the backend that computes its attention."""

    decoder: StepDecoder
    backend: str

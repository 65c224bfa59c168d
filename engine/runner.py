"""The model as the rest of a member sees it: pages in, one step, logits out."""

from typing import Protocol

import torch

from engine.batch import Batch
from engine.layout import Layout
from engine.slab import SlabMemory


class ModelError(RuntimeError):
    """A step could not be computed. The KV rows of its sequences are unknown; their requests end with model_error."""


class Runner(Protocol):
    """One loaded model over its KV slabs. Owned by one thread."""

    @property
    def layout(self) -> Layout: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def slabs(self) -> tuple[SlabMemory, ...]:
        """One slab per KV group, in the order of layout.groups; a unit is a page, page 0 is the null page."""
        ...

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the KV of every row into its pages and return logits.

        Returns float32 [R, vocabulary_size] on the host: one row for each Rows with wants_logits, in the order of the batch.
        Raises ModelError.
        """
        ...


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Whether each row of float32 [R, V] logits can be sampled: its largest value is finite (a NaN anywhere shows up there)."""
    if logits.shape[0] == 0:
        return []
    finite: list[bool] = torch.isfinite(logits.amax(dim=-1)).tolist()
    return finite

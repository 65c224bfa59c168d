"""Rows of logits in registered memory: prefill stages a prompt's last logits here, decode receives them here."""

import torch

from engine.slab import SlabMemory, allocate_slab

MAX_LANDING_ROWS = 65_536
LOGIT_BYTES = 4


class LandingRows:
    """`rows` rows of `vocabulary_size` float32 logits on the host. Who owns which row is the caller's business."""

    def __init__(self, rows: int, vocabulary_size: int) -> None:
        if not 1 <= rows <= MAX_LANDING_ROWS:
            raise ValueError(f"rows is {rows}; the limits are 1 and {MAX_LANDING_ROWS} landing rows")
        slab = allocate_slab(rows, vocabulary_size * LOGIT_BYTES)
        self._table = slab.data.view(torch.float32).view(rows, vocabulary_size)
        self.slab: SlabMemory = slab.memory
        self.rows = rows
        self.vocabulary_size = vocabulary_size

    def row(self, index: int) -> torch.Tensor:
        """The row itself, float32 [vocabulary_size], no copy. Raises IndexError outside the table."""
        if not 0 <= index < self.rows:
            raise IndexError(f"landing row {index} is outside the table of {self.rows} rows")
        return self._table[index]

    def gather(self, indices: list[int]) -> torch.Tensor:
        """A copy of some rows, float32 [len(indices), vocabulary_size], in the order given."""
        for index in indices:
            if not 0 <= index < self.rows:
                raise IndexError(f"landing row {index} is outside the table of {self.rows} rows")
        return self._table[torch.tensor(indices, dtype=torch.int64)]

"""The sampler, order version 1: from logits to one token id for each row.

float32 logits -> logit bias -> grammar mask -> banned ids -> repetition, presence, frequency penalties -> greedy rows: the
largest, at equal logits the smallest id; other rows: divide by temperature -> top-k -> top-p -> min-p -> one draw.

The draw takes the kept ids in ascending order and goes along their cumulative probability up to one uniform number,
which is a function of (seed, position, sequence index). Ascending order, not order of likelihood: two nearly equal
logits that change places between backends then move no other id's share of the line.

Every row is computed from itself alone, with operations that run along rows, so that its token is the same, bit for bit,
whatever rows share the batch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.philox import uniforms
from engine.sample_row import SampleRow
from engine.sampler_edits import SamplerError, edit, edited
from engine.sampler_filters import GROUP_DEPTH, block_sums, draw_filtered, filtered, filters_of, first_above

__all__ = ["SAMPLER_ORDER_VERSION", "SampleRow", "Sampler", "SamplerError"]

SAMPLER_ORDER_VERSION = 1

#: Rows that are scaled and drawn at a time: what they need then stays in the cache (2.5 times faster than 32 at once).
DRAW_ROWS = 8

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class Sampler:
    """Chooses tokens for one model. Holds no state between calls."""

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._width = -(-vocabulary_size // GROUP_DEPTH) * GROUP_DEPTH

    def choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | SamplerError]:
        """One id for each row of float32 [R, V] logits, which are not changed.

        A row with NaN or infinity, with nothing left to choose, or with an id outside the vocabulary gets a SamplerError
        in its place; the others are not affected. Raises ValueError when the tensor does not fit the rows.
        """
        values = self._checked(logits, len(rows))
        chosen: list[int | SamplerError] = [0] * len(rows)
        greedy = [index for index, row in enumerate(rows) if row.params.greedy]
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if greedy:
                self._choose_greedy(values, rows, greedy, chosen)
            if drawn:
                self._choose_drawn(values, rows, drawn, chosen)
        return chosen

    def _checked(self, logits: torch.Tensor, count: int) -> Floats:
        if logits.dtype != torch.float32 or tuple(logits.shape) != (count, self.vocabulary_size):
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}, must be float32 ({count}, {self.vocabulary_size})"
            )
        return logits.detach().cpu().contiguous().numpy()

    def _choose_greedy(
        self, values: Floats, rows: Sequence[SampleRow], indices: list[int], chosen: list[int | SamplerError]
    ) -> None:
        own, errors = _own_rows(values, rows, indices)
        tokens = own.argmax(axis=1)  # a NaN counts as the largest
        finite = np.isfinite(np.take_along_axis(own, tokens[:, None], axis=1)[:, 0])
        for index, token, usable in zip(indices, tokens.tolist(), finite.tolist(), strict=True):
            chosen[index] = token if usable else _unusable(index)
        _put(errors, chosen)

    def _choose_drawn(
        self, values: Floats, rows: Sequence[SampleRow], indices: list[int], chosen: list[int | SamplerError]
    ) -> None:
        keep_all = [index for index in indices if not filtered(rows[index].params, self.vocabulary_size)]
        keep_some = [index for index in indices if filtered(rows[index].params, self.vocabulary_size)]
        for kind in (keep_all, keep_some):
            for start in range(0, len(kind), DRAW_ROWS):
                self._choose_part(values, rows, kind[start : start + DRAW_ROWS], kind is keep_some, chosen)

    def _choose_part(
        self, values: Floats, rows: Sequence[SampleRow], indices: list[int], some: bool, chosen: list[int | SamplerError]
    ) -> None:
        own, errors = _own_rows(values, rows, indices)
        largest = own.max(axis=1)  # a NaN counts as the largest
        usable = np.isfinite(largest)
        for place in np.flatnonzero(~usable).tolist():
            chosen[indices[place]] = _unusable(indices[place])
        if not usable.all():
            own, largest, indices = own[usable], largest[usable], np.array(indices)[usable].tolist()
        if indices:
            tokens = self._draw(own, largest, [rows[index] for index in indices], some)
            for index, token in zip(indices, tokens.tolist(), strict=True):
                chosen[index] = token
        _put(errors, chosen)

    def _draw(self, values: Floats, largest: Floats, rows: Sequence[SampleRow], some: bool) -> Ids:
        """values: [n, V], finite maxima in `largest` [n]. The largest logit is scaled to 0, so no temperature overflows."""
        scaled = np.full((len(rows), self._width), -np.inf, dtype=np.float32)
        inside = scaled[:, : self.vocabulary_size]
        np.subtract(values, largest[:, None], out=inside)
        temperatures = np.array([row.params.temperature for row in rows], dtype=np.float32)
        np.divide(inside, temperatures[:, None], out=inside)
        numbers = uniforms(
            [row.params.seed for row in rows], [row.position for row in rows], [row.sequence_index for row in rows]
        )
        if some:
            return draw_filtered(scaled, filters_of([row.params for row in rows], self.vocabulary_size), numbers)
        return _draw_from_all(scaled, numbers)


def _own_rows(values: Floats, rows: Sequence[SampleRow], indices: list[int]) -> tuple[Floats, list[SamplerError]]:
    """The rows `indices` of the values with their edits: a copy, or the values themselves when nothing would differ."""
    places = [place for place, index in enumerate(indices) if edited(rows[index])]
    if not places and len(indices) == len(values):
        return values, []
    own = values[indices]
    errors = [edit(own[place], rows[indices[place]], indices[place]) for place in places]
    return own, [error for error in errors if error is not None]


def _draw_from_all(scaled: Floats, numbers: npt.NDArray[np.float64]) -> Ids:
    """Inverse CDF over all ids: first along the sums of blocks, then inside one block, so that most ids are only summed."""
    weights = np.exp(scaled)
    sums = block_sums(weights)
    blocks = weights.reshape(len(weights), GROUP_DEPTH, -1)
    targets = numbers * sums[:, -1]
    block = first_above(sums, targets, np.diff(sums, axis=1, prepend=0.0).astype(np.float32))
    row = np.arange(len(weights))
    before = np.where(block > 0, sums[row, block - 1], 0.0)
    inner = blocks[row, block]
    place = first_above(np.cumsum(inner, axis=1, dtype=np.float64), targets - before, inner)
    return block * blocks.shape[2] + place


def _unusable(index: int) -> SamplerError:
    return SamplerError(index, "the logits have a NaN or infinity, or leave no id to choose")


def _put(errors: list[SamplerError], chosen: list[int | SamplerError]) -> None:
    for error in errors:
        chosen[error.row] = error

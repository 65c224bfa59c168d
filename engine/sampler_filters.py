"""Top-k, top-p and min-p over rows of scaled logits, and the draw among what they keep. Pure numpy; every row by itself.

A row's ids are ordered by likelihood, equal ones by id. Each filter keeps a front part of that order, so all of them
together keep the shortest of their front parts, and it is enough to sort the front: first the 128 likeliest, then 1024,
then all, as far as a row needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

#: Ids in one group of the preselection. Rows are padded to a multiple of it.
GROUP_DEPTH = 32

#: Ids that the first and the second attempt sort.
FIRST_FRONT = 128
SECOND_FRONT = 1024

#: More ids than any vocabulary has.
NO_TOP_K = 2**62

_ID_BITS = np.uint64(32)
_ID_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Front:
    """The likeliest ids of each row, in order. ids, weights: [n, K]; weights are exp(scaled logit), 1 for the likeliest.

    certain: [n], how many of them are known to be the right ids; beyond it equal ids may have been left out.
    complete: nothing of the row is missing.
    """

    ids: Ids
    weights: Floats
    certain: Ids
    complete: bool


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of n rows, each [n]: top_k (NO_TOP_K where off), top_p (1 where off), min_p (0 where off)."""

    top_k: Ids
    top_p: Doubles
    min_p: Floats

    def of(self, rows: Ids) -> "Filters":
        """The filters of some of the rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def filtered(params: SamplingParams, vocabulary_size: int) -> bool:
    """Whether any filter can drop an id."""
    return 0 < params.top_k < vocabulary_size or params.top_p < 1.0 or params.min_p > 0.0


def filters_of(params: Sequence[SamplingParams], vocabulary_size: int) -> Filters:
    """The filters as arrays."""
    return Filters(
        np.array([row.top_k if 0 < row.top_k < vocabulary_size else NO_TOP_K for row in params], dtype=np.int64),
        np.array([row.top_p for row in params], dtype=np.float64),
        np.array([row.min_p for row in params], dtype=np.float32),
    )


def draw_filtered(scaled: Floats, filters: Filters, uniforms: Doubles) -> Ids:
    """One id for each row. scaled: [n, width], at most 0, -inf where there is nothing, width a multiple of GROUP_DEPTH.

    Filters act in the order top-k, top-p (mass of what top-k kept), min-p; then inverse CDF over the kept ids, ascending.
    """
    width = scaled.shape[1]
    chosen = np.empty(len(scaled), dtype=np.int64)
    open_rows = np.arange(len(scaled))
    masses = _masses(scaled, filters)
    for front_size in (FIRST_FRONT, SECOND_FRONT, width):
        front = _front(scaled if len(open_rows) == len(scaled) else scaled[open_rows], front_size)
        if front is None:
            continue
        some = filters.of(open_rows)
        kept = _kept(front, some, masses[open_rows])
        settled = np.flatnonzero(kept <= (front.ids.shape[1] if front.complete else front.certain))
        chosen[open_rows[settled]] = _draw(
            front.ids[settled], front.weights[settled], kept[settled], uniforms[open_rows[settled]]
        )
        open_rows = np.delete(open_rows, settled)
        if len(open_rows) == 0:
            break
    return chosen


def first_above(cumulative: Doubles, targets: Doubles, weights: Floats) -> Ids:
    """For each row the first place whose cumulative weight is above the target, at most the last place with a weight.

    cumulative, weights: [n, K]; targets: [n].
    """
    places: Ids = (cumulative <= targets[:, None]).sum(axis=1)
    last: Ids = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    return np.minimum(places, last)


def block_sums(weights: Floats) -> Doubles:
    """Running sums over GROUP_DEPTH blocks of each row: [n, width] -> [n, GROUP_DEPTH]; the last one is the row's mass."""
    blocks = weights.reshape(len(weights), GROUP_DEPTH, -1)
    return np.cumsum(blocks.sum(axis=2), axis=1, dtype=np.float64)


def _masses(scaled: Floats, filters: Filters) -> Doubles:
    """Mass of the whole row where top-p measures against it; 0 elsewhere."""
    masses = np.zeros(len(scaled), dtype=np.float64)
    rows = np.flatnonzero((filters.top_p < 1.0) & (filters.top_k == NO_TOP_K))
    if len(rows):
        masses[rows] = block_sums(np.exp(scaled[rows]))[:, -1]
    return masses


def _front(scaled: Floats, size: int) -> Front | None:
    """The `size` likeliest ids of each row; None when the next size costs no more."""
    rows, width = scaled.shape
    if size >= width:
        return _ordered(np.sort(_keys(scaled, np.arange(width))), complete=True)
    if size >= SECOND_FRONT:
        return _ordered(np.sort(np.partition(_keys(scaled, np.arange(width)), size - 1)[:, :size]), complete=False)
    columns = width // GROUP_DEPTH
    if columns <= size:
        return None
    # Fewer than `size` values exceed the size-th largest; each is in a group whose maximum exceeds it too, so all of
    # them are in the `size` groups with the largest maxima. A group is one column: its maxima are vector operations.
    maxima = scaled.reshape(rows, GROUP_DEPTH, columns).max(axis=1)
    groups = np.argpartition(maxima, columns - size, axis=1)[:, columns - size :]
    ids = (groups[:, None, :] + columns * np.arange(GROUP_DEPTH)[None, :, None]).reshape(rows, -1)
    gathered = scaled.reshape(-1).take(ids + width * np.arange(rows)[:, None])
    keys = np.sort(np.partition(_keys(gathered, ids), size - 1)[:, :size])
    last = keys[:, -1:] >> _ID_BITS
    return _ordered(keys, complete=False, certain=((keys >> _ID_BITS) < last).sum(axis=1))


def _keys(scaled: Floats, ids: Ids) -> npt.NDArray[np.uint64]:
    """One integer for value and id, smaller for likelier and then for smaller ids: bits of a float of one sign are ordered."""
    return (np.abs(scaled).view(np.uint32).astype(np.uint64) << _ID_BITS) | ids.astype(np.uint64)


def _ordered(keys: npt.NDArray[np.uint64], complete: bool, certain: Ids | None = None) -> Front:
    magnitudes = (keys >> _ID_BITS).astype(np.uint32).view(np.float32)
    ids = (keys & _ID_MASK).astype(np.int64)
    if certain is None:
        certain = np.full(len(keys), keys.shape[1], dtype=np.int64)
    return Front(ids, np.exp(-magnitudes), certain, complete)


def _kept(front: Front, filters: Filters, masses: Doubles) -> Ids:
    """How many of each row's likeliest ids are kept; more than the front has when the front does not tell."""
    size = front.ids.shape[1]
    beyond = size if front.complete else size + 1
    cumulative = np.cumsum(front.weights, axis=1, dtype=np.float64)
    by_k = np.minimum(filters.top_k, beyond)
    of_k = np.take_along_axis(cumulative, np.minimum(by_k, size)[:, None] - 1, axis=1)[:, 0]
    targets = filters.top_p * np.where(masses > 0.0, masses, of_k)
    by_p = np.minimum((cumulative < targets[:, None]).sum(axis=1) + 1, beyond)
    by_p = np.where(filters.top_p < 1.0, by_p, beyond)
    # An id without weight cannot be drawn, so it is never worth a look further down.
    by_weight = ((front.weights >= filters.min_p[:, None]) & (front.weights > 0.0)).sum(axis=1)
    by_weight = np.where(by_weight < size, by_weight, beyond)
    # Top-p measures against what top-k keeps: while that reaches below the front its mass is not known.
    unknown = (filters.top_p < 1.0) & (masses == 0.0) & (by_k > size) & (front.weights[:, -1] > 0.0)
    kept: Ids = np.where(unknown, beyond, np.minimum(np.minimum(by_k, by_p), by_weight))
    return kept


def _draw(ids: Ids, weights: Floats, kept: Ids, uniforms: Doubles) -> Ids:
    most = int(kept.max(initial=1))
    weights = np.where(np.arange(most) < kept[:, None], weights[:, :most], np.float32(0.0))
    pairs = np.sort((ids[:, :most].astype(np.uint64) << _ID_BITS) | weights.view(np.uint32))
    ids = (pairs >> _ID_BITS).astype(np.int64)
    weights = (pairs & _ID_MASK).astype(np.uint32).view(np.float32)
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    places = first_above(cumulative, uniforms * cumulative[:, -1], weights)
    return np.take_along_axis(ids, places[:, None], axis=1)[:, 0]

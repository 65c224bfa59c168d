"""How likely a token was: log-softmax of a row of the model's own logits, before a request changed anything in them. Pure numpy.

Each row is computed by itself, always in the same order, so what it gives does not depend on the rows beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """Natural logarithms. `top_ids`, `top_values`: the most likely tokens, likeliest first, equal ones by id."""

    value: float
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()


def log_prob(row: Floats, token: int, top: int) -> TokenLogProb:
    """Of `token` in one row of logits, float32 [V], with those of the `top` likeliest ids (all of them when V is less).

    The values are rounded to float32, as they travel. The row has no NaN and its largest value is finite.
    """
    largest = np.float64(row.max())
    with np.errstate(under="ignore", over="ignore"):
        mass = np.exp(row - np.float32(largest)).sum(dtype=np.float64)
    above = np.log(mass)
    ids = likeliest(row, top)
    values = (row[ids].astype(np.float64) - largest - above).astype(np.float32)
    own = np.float32(np.float64(row[token]) - largest - above)
    return TokenLogProb(float(own), tuple(ids.tolist()), tuple(values.tolist()))


def following(block: Floats, tokens: Sequence[int], top: int) -> tuple[TokenLogProb, ...]:
    """Of each token in its row of float32 [n, V]; `tokens` are the ones that follow, in order, at most n."""
    return tuple(log_prob(row, token, top) for row, token in zip(block, tokens, strict=False))


def likeliest(row: Floats, count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest values of float32 [V], largest first, equal ones by id; all ids when V is less."""
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    border = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > border)
    ids = np.concatenate((above, np.flatnonzero(row == border)[: count - len(above)]))
    return ids[np.lexsort((ids, -row[ids]))]


def log_probs(logits: Floats, tokens: Sequence[int | None], tops: Sequence[int | None]) -> tuple[TokenLogProb | None, ...]:
    """For each row of float32 [R, V] the one of its token; None where there is no token, or `tops` says that none is wanted."""
    return tuple(
        log_prob(row, token, top) if token is not None and top is not None else None
        for row, token, top in zip(logits, tokens, tops, strict=True)
    )

"""What changes a row of logits before a token is chosen: bias, grammar, banned ids, penalties, in this order. Pure numpy."""

import numpy as np
import numpy.typing as npt

from engine.grammar_state import allowed_ids
from engine.sample_row import SampleRow


class SamplerError(Exception):
    """A row from which no token can be chosen. Only that row's sequence is affected."""

    def __init__(self, row: int, cause: str) -> None:
        super().__init__(f"row {row}: {cause}")
        self.row = row
        self.cause = cause


def edited(row: SampleRow) -> bool:
    """Whether the row's logits change at all."""
    return bool(row.params.logit_bias or row.allowed is not None or row.banned_ids or row.params.penalised)


def edit(logits: npt.NDArray[np.float32], row: SampleRow, index: int) -> SamplerError | None:
    """Change one row, float32 [V], in place. Returns an error when an id is outside the vocabulary."""
    params, size = row.params, len(logits)
    if params.logit_bias:
        ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        if ids.max() >= size:
            return SamplerError(index, f"logit_bias names id {ids.max()}, the vocabulary has {size}")
        logits[ids] += np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
    if row.allowed is not None:
        allowed = allowed_ids(row.allowed, size).copy()
        endings = np.array(row.ending_ids, dtype=np.int64)
        allowed[endings[endings < size]] = True
        logits[~allowed] = -np.inf
    if row.banned_ids:
        banned = np.array(row.banned_ids, dtype=np.int64)
        logits[banned[banned < size]] = -np.inf
    if params.penalised and row.history is not None:
        return _penalise(logits, row, index)
    return None


def _penalise(logits: npt.NDArray[np.float32], row: SampleRow, index: int) -> SamplerError | None:
    """Repetition counts ids of prompt and output, presence and frequency those of the output only."""
    assert row.history is not None
    ids, counts, params = row.history.ids, row.history.output_counts, row.params
    if len(ids) == 0:
        return None
    if ids.max() >= len(logits):
        return SamplerError(index, f"the tokens so far have id {ids.max()}, the vocabulary has {len(logits)}")
    values = logits[ids]
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    values -= (params.presence_penalty * (counts > 0) + params.frequency_penalty * counts).astype(np.float32)
    logits[ids] = values
    return None

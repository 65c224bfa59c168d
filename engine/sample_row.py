"""What the sampler is told about one row of logits, and the counts that penalties need. Pure: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.grammar_library import Bits
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class HistoryCounts:
    """What penalties read: distinct ids of prompt and output, and how often each is in the output; both [n]."""

    ids: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.int64]


class TokenHistory:
    """The distinct ids of a prompt and its output, with how often each is in the output.

    Adding a token takes constant time on average, so a penalised sequence pays for its distinct ids at each step
    and never for its length.
    """

    __slots__ = ("_counts", "_ids", "_length", "_slots")

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._length = len(distinct)
        self._ids = distinct
        self._counts = np.zeros(self._length, dtype=np.int64)
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._length
            self._length += 1
            if slot == len(self._ids):
                room = np.zeros(max(64, slot), dtype=np.int64)
                self._ids = np.concatenate((self._ids, room))
                self._counts = np.concatenate((self._counts, room))
            self._ids[slot] = token
        self._counts[slot] += 1

    def after(self, token_ids: Sequence[int]) -> HistoryCounts:
        """The counts as they would be with these output tokens added; a copy."""
        ids, counts = self.ids, self.output_counts.copy()
        new: dict[int, int] = {}
        for token in token_ids:
            slot = self._slots.get(token)
            if slot is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[slot] += 1
        if new:
            ids = np.concatenate((ids, np.fromiter(new.keys(), np.int64, len(new))))
            counts = np.concatenate((counts, np.fromiter(new.values(), np.int64, len(new))))
        return HistoryCounts(ids, counts)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct ids of prompt and output; a view, shape [n]."""
        return self._ids[: self._length]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """How often each of `ids` is in the output, 0 for ids of the prompt only; a view, shape [n]."""
        return self._counts[: self._length]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits to choose from.

    position: index of the token to be chosen in the output, from 0. history: needed when `params.penalised`.
    allowed: int32 [words] with bit i % 32 of word i // 32 set where a grammar lets id i follow; None without a grammar.
    ending_ids: may follow although their bits are not set. banned_ids: ids that cannot be chosen.
    """

    params: SamplingParams
    sequence_index: int
    position: int
    history: TokenHistory | HistoryCounts | None = None
    banned_ids: Sequence[int] = ()
    allowed: Bits | None = None
    ending_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.params.penalised and self.history is None:
            raise ValueError("history is missing: a row with penalties needs the tokens so far")

"""What one step computes: rows of tokens per sequence, and where their KV lives."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one sequence in one step: a prefill chunk, or a single decode token.

    token_ids: ids at positions first_position, first_position + 1, ...; everything before is already in the pages.
    pages: one page table per KV group, covering at least first_position + len(token_ids) tokens; entries beyond are ignored.
    wants_logits: whether the last token's logits are returned.
    """

    sequence: str
    token_ids: Sequence[int]
    first_position: int
    pages: tuple[Sequence[int], ...]
    wants_logits: bool

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"token_ids of sequence {self.sequence} is empty; a scheduled sequence has at least one token")
        if self.first_position < 0:
            raise ValueError(f"first_position of sequence {self.sequence} is {self.first_position}; it must be >= 0")
        if not self.pages:
            raise ValueError(f"pages of sequence {self.sequence} is empty; give one page table per KV group")

    @property
    def end_position(self) -> int:
        """Tokens in the cache when the step has run."""
        return self.first_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Prefill chunks and decode rows may be mixed; a sequence is in it at most once."""

    rows: tuple[Rows, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; a step has at least one sequence")
        if len({rows.sequence for rows in self.rows}) != len(self.rows):
            raise ValueError("a sequence is in the batch twice; schedule each sequence at most once a step")

    @property
    def scheduled_tokens(self) -> int:
        return sum(len(rows.token_ids) for rows in self.rows)

    @property
    def scheduled_sequences(self) -> int:
        return len(self.rows)

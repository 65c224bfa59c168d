"""What one step computes: rows of tokens per sequence, and where their KV lives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one sequence in one step: a prefill chunk, or a decode token with the drafts of those that may follow it.

    token_ids: ids at positions first_position, first_position + 1, ...; everything before is already in the pages.
    pages: one page table per KV group, covering at least first_position + len(token_ids) tokens; entries beyond are ignored.
    wants_logits: whether the last token's logits are returned. all_logits: with it, those of every token are, in order.
    draft_tokens: all token_ids but the first are drafts, and the logits of every token are returned; 0: there are none.
    adapter: name of the adapter that computes them; empty: the base model.
    """

    sequence: str
    token_ids: Sequence[int]
    first_position: int
    pages: tuple[Sequence[int], ...]
    wants_logits: bool
    all_logits: bool = False
    draft_tokens: int = 0
    adapter: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"token_ids of sequence {self.sequence} is empty; a scheduled sequence has at least one token")
        if self.first_position < 0:
            raise ValueError(f"first_position of sequence {self.sequence} is {self.first_position}; it must be >= 0")
        if not self.pages:
            raise ValueError(f"pages of sequence {self.sequence} is empty; give one page table per KV group")
        if self.draft_tokens and (self.draft_tokens != len(self.token_ids) - 1 or not self.wants_logits):
            raise ValueError(
                f"draft_tokens of sequence {self.sequence} is {self.draft_tokens} of {len(self.token_ids)} tokens; "
                "drafts follow one token, and logits are wanted"
            )

    @property
    def end_position(self) -> int:
        """Tokens in the cache when the step has run."""
        return self.first_position + len(self.token_ids)

    def singly(self) -> tuple["Rows", ...]:
        """Drafts as decode tokens of sequences that share the pages; anything else as it is. The logits are the same rows."""
        if not self.draft_tokens:
            return (self,)
        return tuple(
            Rows(f"{self.sequence}+{place}", (token,), self.first_position + place, self.pages, True, adapter=self.adapter)
            for place, token in enumerate(self.token_ids)
        )


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

    @property
    def draft_tokens(self) -> int:
        return sum(rows.draft_tokens for rows in self.rows)

    def singly(self) -> "Batch":
        """The same step with each draft as a row of its own (see Rows.singly)."""
        return Batch(tuple(each for rows in self.rows for each in rows.singly())) if self.draft_tokens else self


@dataclass(frozen=True, slots=True)
class LayerMarks:
    """`told(n)` is called by a step, on its thread, once the KV of all its rows is written in the first n layers, for each n of
    `layers` (1 to the model's layers, ascending). A device that computes behind the caller's back tells nothing."""

    layers: tuple[int, ...]
    told: Callable[[int], None]

"""Where drafts come from: the port, and the implementation that looks them up in the text itself. Pure.

The other one is decode_svc.draft_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.prompt_lookup import LookupLimits, PromptLookup
from engine.sequence import Sequence as TokenSequence

#: Tokens that are made searchable before one step, of all sequences together; a long prompt takes some steps.
CATCH_UP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Wish:
    """At most `most` drafts, at least 1, of what follows the token that waits to be fed. `seat`: its number, never used twice."""

    seat: int
    sequence: TokenSequence
    most: int


class DraftSource(Protocol):
    """Guesses what sequences will say. A wrong guess costs time and nothing else, so it may fail to guess at any time."""

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """Drafts by seat, for those that there are any for: 1 to `most` ids of the model's vocabulary."""
        ...

    def forget(self, seat: int) -> None:
        """The seat has ended. May be told of seats that were never asked for."""
        ...


class LookupDrafts:
    """Implements DraftSource by engine.prompt_lookup."""

    def __init__(self, limits: LookupLimits) -> None:
        self._limits = limits
        self._texts: dict[int, PromptLookup] = {}

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource."""
        left = CATCH_UP_TOKENS
        found = {}
        for wish in wishes:
            text = self._texts.get(wish.seat)
            if text is None:
                text = self._texts[wish.seat] = PromptLookup(self._limits)
            behind = wish.sequence.tokens - text.length
            if behind > 0 and left > 0:
                text.add(wish.sequence.tokens_from(text.length, min(behind, left)))
            left -= min(behind, left)
            if text.length == wish.sequence.tokens and (drafts := text.propose(wish.most)):
                found[wish.seat] = drafts
        return found

    def forget(self, seat: int) -> None:
        """See DraftSource."""
        self._texts.pop(seat, None)

"""Where drafts come from: the port, and two implementations: one looks them up in the text itself, one asks the grammar. Pure.

The third one is decode_svc.draft_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.prompt_lookup import LookupLimits, PromptLookup
from engine.sequence import Sequence as TokenSequence

#: Forced tokens that are kept for the steps to come; the rest is asked for again.
FORCED_TOKENS = 1024
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


@dataclass(slots=True)
class _Forced:
    """Ids that were forced from place `first` of a sequence's tokens on."""

    first: int
    token_ids: tuple[int, ...]


class GrammarDrafts:
    """Implements DraftSource by what a grammar leaves no choice about: names in an object, what enumerated texts begin with.

    The text is certain, how it is cut into tokens is not: the longest ones are drafted, and the model may choose others.
    """

    def __init__(self) -> None:
        self._forced: dict[int, _Forced] = {}

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource. Sequences without a grammar get none."""
        found = {}
        for wish in wishes:
            if wish.sequence.grammar is not None and (left := self._left(wish)):
                found[wish.seat] = left[: wish.most]
        return found

    def forget(self, seat: int) -> None:
        """See DraftSource."""
        self._forced.pop(seat, None)

    def _left(self, wish: Wish) -> tuple[int, ...]:
        """What is forced from here on: asked once for each stretch, which may be long."""
        known, sequence = self._forced.get(wish.seat), wish.sequence
        assert sequence.grammar is not None
        if known is not None:
            count = sequence.tokens - known.first
            if count < len(known.token_ids) and sequence.tokens_from(known.first, count) == known.token_ids[:count]:
                return known.token_ids[count:]
        forced = sequence.grammar.forced()[:FORCED_TOKENS]
        self._forced[wish.seat] = _Forced(sequence.tokens, forced)
        return forced

"""Drafts of a simulated decode member: what the request must say when nothing disturbs it, with mistakes."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from decode_svc.drafts import Wish
from engine.sequence import Earlier
from tests.simulation.model import LIKED, Reference


class SimulatedDrafts:
    """decode_svc.drafts.DraftSource; each draft is right with probability `right`."""

    def __init__(self, rng: random.Random, right: float) -> None:
        self._rng = rng
        self._right = right
        self._outputs: dict[int, tuple[int, ...]] = {}

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource."""
        return {wish.seat: drafts for wish in wishes if (drafts := self._drafts(wish))}

    def forget(self, seat: int) -> None:
        """See DraftSource."""
        self._outputs.pop(seat, None)

    def _drafts(self, wish: Wish) -> tuple[int, ...]:
        output = self._outputs.get(wish.seat)
        if output is None:
            output = self._outputs[wish.seat] = Reference(replace(wish.sequence.spec, earlier=Earlier())).tokens
        first, rng = wish.sequence.selected_tokens, self._rng
        # Also of what comes after the end: nobody may ever see it.
        known = (*output[first:], *rng.choices(LIKED, k=wish.most))[: rng.randint(0, wish.most)]
        return tuple(token if rng.random() < self._right else rng.choice(LIKED) for token in known)

"""Drafts for tests: what a scripted model will say, with as many mistakes as the test wants."""

import random
from collections.abc import Mapping, Sequence

from decode_svc.drafts import Wish
from tests.scripted import ScriptedRunner

WRONG = 255


class Guesses:
    """Implements DraftSource. Each draft is what will be said with probability `right`; there are all wanted ones if that is 1,
    else any number of them."""

    def __init__(self, runner: ScriptedRunner, right: float, seed: int = 0) -> None:
        self.right = right
        self.asked: list[Wish] = []
        self.forgotten: list[int] = []
        self._runner = runner
        self._rng = random.Random(seed)

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource."""
        self.asked += wishes
        return {wish.seat: drafts for wish in wishes if (drafts := self._drafts(wish))}

    def forget(self, seat: int) -> None:
        """See DraftSource."""
        self.forgotten.append(seat)

    def _drafts(self, wish: Wish) -> tuple[int, ...]:
        history = wish.sequence.spec.prompt_token_ids + wish.sequence.output_token_ids
        drafts: list[int] = []
        for _ in range(wish.most if self.right == 1.0 else self._rng.randint(0, wish.most)):
            drafts.append(self._runner.next_token((*history, *drafts)) if self._rng.random() < self.right else WRONG)
        return tuple(drafts)

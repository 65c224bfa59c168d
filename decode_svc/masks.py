"""The grammars of one step: their masks are filled while the model runs; what has none ends its own request."""

from collections.abc import Callable
from dataclasses import dataclass

from decode_svc.planning import Plan
from engine.mask_filler import MaskFiller
from lifecycle.finish import Cause, Ending, FinishReason

#: Longest wait for the masks of a step, in seconds, once its logits are there.
MASK_S_MAX = 1.0

GRAMMAR_FAILED = Ending(FinishReason.MODEL_ERROR, Cause.GRAMMAR_FAILED)


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Of one step, in seconds: what filling took, and how long the step waited for it."""

    fill_s: float = 0.0
    wait_s: float = 0.0


class StepMasks:
    """`begin` before the model runs, `finish` before tokens are chosen. On the engine thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._filler = MaskFiller(MASK_S_MAX, clock)

    def begin(self, plan: Plan) -> None:
        """Have the masks of this step's tokens filled, and those after drafts."""
        states = [seat.sequence.grammar for seat in plan.draws]
        self._filler.begin([state for state in states if state is not None])

    def finish(self, plan: Plan) -> MaskTimes | None:
        """Wait for them; None without any. A sequence whose grammar gives no mask, or allows nothing, is marked to end; one that
        only lacks masks after drafts drafts no more."""
        constrained = [seat for seat in plan.draws if seat.sequence.grammar is not None]
        if not constrained:
            return None
        began = self._clock()
        failed = self._filler.finish()
        for seat in constrained:
            if any(state is seat.sequence.grammar for state in failed) and not seat.sequence.renew_grammar():
                seat.sequence.drop_grammar()
                seat.end_with(GRAMMAR_FAILED)
            elif seat.sequence.stuck:
                seat.end_with(GRAMMAR_FAILED)
        return MaskTimes(self._filler.last_s, self._clock() - began)

    def close(self) -> None:
        """No thread is left that has nothing to do."""
        self._filler.close()

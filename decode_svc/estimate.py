"""How long an output is expected to get, from the outputs that ended before it. Pure."""

import math
from bisect import bisect_left, insort
from collections import deque

#: Outputs that are remembered; older ones no longer count.
WINDOW = 256
#: Outputs that must have ended before anything but the worst is expected.
SAMPLES_MIN = 8
#: An output that got longer than expected is expected to go on for this share of what it has.
GROWTH = 0.25


class Estimate:
    """A running quantile of output lengths, in tokens. `quantile` above 0 to 1; `margin` is a share put on top, from 0."""

    def __init__(self, quantile: float, margin: float) -> None:
        if not 0 < quantile <= 1 or margin < 0:
            raise ValueError(f"quantile is {quantile} and margin {margin}; they must be above 0 to 1, and at least 0")
        self._quantile = quantile
        self._margin = margin
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []

    def add(self, output_tokens: int) -> None:
        """An output ended by itself, after that many tokens."""
        if len(self._lengths) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._lengths[0])]
        self._lengths.append(output_tokens)
        insort(self._sorted, output_tokens)

    @property
    def output_tokens(self) -> int | None:
        """Tokens of an output not begun yet; None while too few have ended."""
        if len(self._sorted) < SAMPLES_MIN:
            return None
        place = math.ceil(self._quantile * len(self._sorted)) - 1
        return max(1, math.ceil(self._sorted[place] * (1 + self._margin)))

    def total(self, chosen: int, most: int) -> int:
        """Tokens that an output of which `chosen` are there will have in the end; at most `most`."""
        expected = self.output_tokens
        if expected is None:
            return most
        if chosen >= expected:
            expected = chosen + max(1, math.ceil(GROWTH * chosen))
        return min(expected, most)

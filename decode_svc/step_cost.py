"""What one more row in a step costs, learned from the steps that ran. Pure."""

#: Weight that an earlier step keeps for each later one.
KEPT = 0.98
#: Before anything is known a step of one row costs as much as so many rows more. Native bfloat16 steps: 8 to 40.
ROWS_OF_A_STEP = 12.0
#: How much the guess above counts, as a spread of row numbers (rows squared) among steps.
GUESS_SPREAD = 16.0
#: One step counts at most as so many mean ones: another process may have had the core.
OUTLIER = 6.0


class StepCost:
    """A line through (rows, seconds) of the last steps, drawn towards a guess while they all had like numbers of rows."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._spread = 0.0
        self._together = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. Means and spreads are updated as by Welford, with forgetting."""
        if self._weight > 1.0:
            seconds = min(seconds, OUTLIER * self._seconds)
        self._weight = KEPT * self._weight + 1.0
        share = 1.0 / self._weight
        off = rows - self._rows
        self._rows += share * off
        self._seconds += share * (seconds - self._seconds)
        self._spread = KEPT * self._spread + off * (rows - self._rows)
        self._together = KEPT * self._together + off * (seconds - self._seconds)

    def row_share(self, rows: int, more_s: float = 0.0) -> float:
        """What one row more costs, as a share of a step of `rows` rows: 0 to 1 / rows. more_s: what it takes beside the step, in
        seconds, without any bound."""
        if self._seconds <= 0.0:
            return 1.0 / (ROWS_OF_A_STEP + rows)
        guess = self._seconds / (self._rows + ROWS_OF_A_STEP)
        row_s = (self._together + GUESS_SPREAD * guess) / (self._spread + GUESS_SPREAD)
        step_s = self._seconds + row_s * (rows - self._rows)
        more = more_s / max(step_s, guess)
        if row_s <= 0.0 or step_s <= 0.0:
            return more + (0.0 if row_s <= 0.0 else 1.0 / rows)
        return more + min(row_s / step_s, 1.0 / rows)

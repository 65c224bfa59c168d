"""When a decode member gives way to prompts that wait beside it. Pure.

A step costs about the same for few sequences as for some more, since it reads all weights. While many prompts wait at a prefill
member that shares this member's cores, steps of the few that have begun keep a core from those that would fill the next ones.
So steps then begin at most once a period, and the core is lent in between.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """`prompts`: so many have to wait at one member. `period_s`: from the begin of a step to the next; 0 gives way to nobody."""

    prompts: int = 2
    period_s: float = 0.06


class Pace:
    """Of one member. Times are monotonic seconds."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._began_at: float | None = None
        self.due_at: float | None = None

    def began(self, now: float) -> None:
        """A step begins."""
        self._began_at, self.due_at = now, None

    def gives_way(self, waiting_prompts: int, now: float) -> bool:
        """Whether the next step is not to begin yet, with so many prompts waiting beside; until `due_at` then."""
        self.due_at = None
        if self._began_at is None or waiting_prompts < self._limits.prompts:
            return False
        due_at = self._began_at + self._limits.period_s
        if now >= due_at:
            return False
        self.due_at = due_at
        return True

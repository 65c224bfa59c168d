"""The four clocks of a request as values. Durations cross processes; clock readings never do."""

from dataclasses import dataclass
from enum import Enum


class Clock(Enum):
    """Which limit ran out."""

    QUEUE = "queue"
    FIRST_TOKEN = "first_token"
    INTER_TOKEN = "inter_token"
    OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Limits:
    """Durations in seconds; None is no limit."""

    queue_s: float | None = None
    first_token_s: float | None = None
    inter_token_s: float | None = None
    overall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits with the reading of the local monotonic clock at which they started, in seconds."""

    limits: Limits
    arrived_at: float

    def expired(self, now: float, admitted: bool, last_token_at: float | None) -> Clock | None:
        """The clock that has run out at `now`, the overall one first; None when none has.

        The queue clock counts until admission, the first-token clock until a token was selected, the inter-token
        clock from the last selected token.
        """
        limits, age = self.limits, now - self.arrived_at
        if limits.overall_s is not None and age >= limits.overall_s:
            return Clock.OVERALL
        if not admitted and limits.queue_s is not None and age >= limits.queue_s:
            return Clock.QUEUE
        if last_token_at is None:
            return Clock.FIRST_TOKEN if limits.first_token_s is not None and age >= limits.first_token_s else None
        if limits.inter_token_s is not None and now - last_token_at >= limits.inter_token_s:
            return Clock.INTER_TOKEN
        return None

    def next_expiry(self, admitted: bool, last_token_at: float | None) -> float | None:
        """The earliest reading of the clock at which `expired` can answer; None when no limit is running."""
        limits = self.limits
        ends: list[float] = []
        if limits.overall_s is not None:
            ends.append(self.arrived_at + limits.overall_s)
        if not admitted and limits.queue_s is not None:
            ends.append(self.arrived_at + limits.queue_s)
        if last_token_at is None and limits.first_token_s is not None:
            ends.append(self.arrived_at + limits.first_token_s)
        if last_token_at is not None and limits.inter_token_s is not None:
            ends.append(last_token_at + limits.inter_token_s)
        return min(ends, default=None)

    def remaining(self, now: float, limit_s: float | None) -> float | None:
        """Seconds left of `limit_s` counted from arrival, at least 0; None when there is no limit."""
        return None if limit_s is None else max(0.0, self.arrived_at + limit_s - now)

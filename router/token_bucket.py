"""A token bucket: so much a second on average, so much at once. Pure: time comes in, in monotonic seconds."""

from dataclasses import dataclass

#: Less than that is missing only because of rounding.
_LEAST = 1e-6


@dataclass(slots=True)
class TokenBucket:
    """Fills by `per_s` units a second up to `burst`. What is taken beyond its level is owed, and filled up first."""

    per_s: float
    burst: float
    level: float = 0.0
    at: float = 0.0

    def __post_init__(self) -> None:
        if self.per_s <= 0 or self.burst <= 0:
            raise ValueError(f"a bucket fills and holds more than 0; got {self.per_s} a second, {self.burst} at once")

    @classmethod
    def full(cls, per_s: float, burst: float, now: float) -> "TokenBucket":
        """One that nothing was taken from."""
        return cls(per_s, burst, burst, now)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there, 0 when it is. More than the bucket holds is there when it is full."""
        self._fill(now)
        short = min(amount, self.burst) - self.level
        return short / self.per_s if short > _LEAST else 0.0

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, or owes it."""
        self._fill(now)
        self.level -= amount

    def is_full(self, now: float) -> bool:
        """Whether it is as if nothing had ever been taken."""
        self._fill(now)
        return self.level >= self.burst

    def _fill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.burst, self.level + (now - self.at) * self.per_s)
            self.at = now

"""What clients saw, and figures of it. Pure; times are seconds of the client's monotonic clock."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Seen:
    """One request. `arrivals`: (moment, tokens in it) of each delta. `beside`: it only ran along, and is not in the figures.

    `phases`: what the server says about it, by name, where it says anything. `failure` is a sentence, `reason` a label for it.
    `cancelled_at`: when the client asked for its end; 0 when it did not.
    """

    asked_at: float
    wanted_tokens: int
    beside: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""
    cancelled_at: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_s(self) -> float:
        """From sending to the first delta. Raises IndexError when none came."""
        return self.arrivals[0][0] - self.asked_at

    def gaps_s(self) -> list[float]:
        """Between tokens; a delta of k tokens counts as k gaps of a k-th each."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [gap for (before, _), (at, count) in pairs for gap in [(at - before) / max(1, count)] * max(1, count)]

    def close(self, now: float) -> None:
        """The end; an answer of another length than was asked for is a failure, unless it was cancelled."""
        self.ended_at = now
        if not self.failure and not self.cancelled_at and self.tokens != self.wanted_tokens:
            self.failure = f"{self.tokens} tokens came, {self.wanted_tokens} were asked for"
            self.reason = "WRONG_LENGTH"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what its clients saw, from the first request to the last end."""

    seconds: float
    requests: tuple[Seen, ...]

    def counted(self) -> list[Seen]:
        """Requests that ran to their end and are in the figures."""
        return [one for one in self.requests if not one.failure and not one.beside and not one.cancelled_at]

    def cancelled(self) -> list[Seen]:
        """Requests that their client cancelled, and that ended for it."""
        return [one for one in self.requests if one.cancelled_at and not one.failure]

    def failures(self) -> list[str]:
        """What went wrong, a sentence each."""
        return [one.failure for one in self.requests if one.failure]

    def failures_by_reason(self) -> dict[str, int]:
        """How many went wrong, by label, the most frequent first."""
        return dict(Counter(one.reason for one in self.requests if one.failure).most_common())

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of the requests in the figures over the whole run."""
        return sum(one.tokens for one in self.counted()) / self.seconds

    def first_token_s(self, share: float) -> float:
        """Quantile of the time to first token."""
        return quantile([one.first_token_s for one in self.counted()], share)

    def gap_s(self, share: float) -> float:
        """Quantile of the inter-token time of all tokens together."""
        return quantile([gap for one in self.counted() for gap in one.gaps_s()], share)

    def cancel_s(self, share: float) -> float:
        """Quantile of the time from a cancel to the end of its request, as the client sees it."""
        return quantile([one.ended_at - one.cancelled_at for one in self.cancelled()], share)

    def phase_s(self, name: str, share: float) -> float:
        """Quantile of a phase that the server reports."""
        return quantile([one.phases[name] for one in self.counted() if name in one.phases], share)


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least `share` of the values do not exceed (nearest rank); 0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -(-round(share * len(ordered) * 1e9) // 1_000_000_000)  # ceiling, safe from 0.99 * 100 = 99.00000000000001
    return ordered[min(len(ordered), max(1, rank)) - 1]

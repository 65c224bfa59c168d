"""What clients saw, and figures of it. Pure; times are seconds of the client's monotonic clock."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.disturbance import Disturbance


@dataclass(slots=True)
class Seen:
    """One request. `arrivals`: (moment, tokens in it) of each delta. `beside`: it only ran along, and is not in the figures.

    `phases`: what the server says about it, by name, where it says anything.
    """

    asked_at: float
    wanted_tokens: int
    beside: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""

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
        """The end; an answer of another length than was asked for is a failure."""
        self.ended_at = now
        if not self.failure and self.tokens != self.wanted_tokens:
            self.failure = f"{self.tokens} tokens came, {self.wanted_tokens} were asked for"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what its clients saw, from the first request to the last end."""

    seconds: float
    requests: tuple[Seen, ...]
    disturbance: Disturbance

    def counted(self) -> list[Seen]:
        """Requests that ended well and are in the figures."""
        return [one for one in self.requests if not one.failure and not one.beside]

    def failures(self) -> list[str]:
        """What went wrong, a sentence each."""
        return [one.failure for one in self.requests if one.failure]

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


def median(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    """The median of a figure over runs; 0 for none."""
    return statistics.median(figure(run) for run in runs) if runs else 0.0

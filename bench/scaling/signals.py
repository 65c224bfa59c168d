"""The chart's queries over the scrapes of a simulated cell: the same numbers that Prometheus would answer. Pure.

tests/scaling holds both against one another: the real expressions, asked of the same scrapes by promtool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from telemetry.buckets import INTER_TOKEN_S


@dataclass(frozen=True, slots=True)
class PrefillScrape:
    """Of one member: prompt tokens not yet computed, seconds in steps since its start."""

    waiting_tokens: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class DecodeScrape:
    """Of one member: share of KV pages used or promised, open seats, sequences that generate."""

    kv_reserved: float
    seats: float
    running: float = 0


@dataclass(frozen=True, slots=True)
class RouterScrape:
    """Of all routers: members that take work, by pool; requests and prompt tokens that wait; requests that run. Since the
    start: prompt tokens that were offered and that are ready; inter-token times as cumulative counts of
    telemetry.buckets.INTER_TOKEN_S and all."""

    members: Mapping[str, int]
    queued_tokens: float = 0
    queued_requests: float = 0
    running_requests: float = 0
    offered_tokens: float = 0
    ready_tokens: float = 0
    inter_token: tuple[int, ...] = (0,) * (len(INTER_TOKEN_S) + 1)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What Prometheus got at one time: members by name; those that it could not read are absent. `router` None: no router."""

    at: float
    prefill: Mapping[str, PrefillScrape] = field(default_factory=dict)
    decode: Mapping[str, DecodeScrape] = field(default_factory=dict)
    router: RouterScrape | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """As bench.scaling.queries.Scope; `seconds` of rates, `cost_seconds` of what a prompt token costs."""

    seconds: float = 60.0
    cost_seconds: float = 300.0
    quantile: float = 0.95
    started: float = 0.5


#: From a scrape until the queries are asked, in seconds.
ASKED_AFTER_S = 1.0

Series = list[tuple[float, float]]


def signals(history: Sequence[Scrape], window: Window) -> dict[str, float | None]:
    """The answers ASKED_AFTER_S after the last scrape, by pool and name joined by a dot; None where there is none."""
    now, router = history[-1], history[-1].router
    if router is None:
        return dict.fromkeys(
            (
                *("prefill.backlog", "prefill.busy", "prefill.offered"),
                *("decode.kv", "decode.sequences", "decode.offered", "decode.interToken"),
            )
        )
    asked = _Asked(history, window)
    found = {**_prefill(now, router, asked), **_decode(now, router, asked)}
    found["decode.interToken"] = _inter_token(asked.recent, window.quantile) * router.members["decode"]
    return found


def _prefill(now: Scrape, router: RouterScrape, asked: "_Asked") -> dict[str, float | None]:
    if not now.prefill:
        return dict.fromkeys(("prefill.backlog", "prefill.busy", "prefill.offered"))
    factor = max(1.0, router.members["prefill"] / len(now.prefill))
    busy, cost = asked.busy(asked.window.seconds), asked.busy(asked.window.cost_seconds)
    counts = busy is not None and busy >= asked.window.started * len(now.prefill)
    waiting = sum(one.waiting_tokens for one in now.prefill.values())
    return {
        "prefill.backlog": waiting * factor + (router.queued_tokens if counts else 0.0),
        "prefill.busy": None if busy is None else busy * factor,
        "prefill.offered": asked.offered(None if cost is None else cost * factor),
    }


def _decode(now: Scrape, router: RouterScrape, asked: "_Asked") -> dict[str, float | None]:
    if not now.decode:
        return dict.fromkeys(("decode.kv", "decode.sequences", "decode.offered"))
    factor = max(1.0, router.members["decode"] / len(now.decode))
    reserved, seats, running = (
        sum(getattr(one, name) for one in now.decode.values()) for name in ("kv_reserved", "seats", "running")
    )
    queued = router.queued_requests if reserved >= asked.window.started * len(now.decode) else 0.0
    return {
        "decode.kv": reserved * factor,
        "decode.sequences": seats * factor + queued,
        "decode.offered": asked.offered_at_once(reserved * factor * running / seats if seats else None),
    }


class _Asked:
    """Rates over the scrapes of a window, as Prometheus makes them."""

    def __init__(self, history: Sequence[Scrape], window: Window) -> None:
        self.window = window
        self._history = history
        self._at = history[-1].at + ASKED_AFTER_S
        self.recent = self._within(window.seconds)

    def busy(self, seconds: float) -> float | None:
        """Members' worth of computing: the rates of each member, added."""
        seen: dict[str, Series] = {}
        for scrape in self._within(seconds):
            for name, one in scrape.prefill.items():
                seen.setdefault(name, []).append((scrape.at, one.step_seconds))
        rates = [rate for series in seen.values() if (rate := self._rate(series, seconds)) is not None]
        return sum(rates) if rates else None

    def offered(self, cost: float | None) -> float | None:
        """What is offered at what was paid, in members, for the prompts that were computed meanwhile."""
        return self._scaled(cost, self.window.cost_seconds)

    def offered_at_once(self, cost: float | None) -> float | None:
        """The same at what is paid now."""
        return self._scaled(cost, self.window.seconds)

    def _scaled(self, cost: float | None, seconds: float) -> float | None:
        offered, ready = self._of_router("offered_tokens", self.window.seconds), self._of_router("ready_tokens", seconds)
        if offered is None:
            return None
        if cost is not None and ready:
            return cost * offered / ready
        return None if offered else 0.0

    def _of_router(self, name: str, seconds: float) -> float | None:
        found = [(one.at, getattr(one.router, name)) for one in self._within(seconds) if one.router is not None]
        return self._rate(found, seconds)

    def _within(self, seconds: float) -> list[Scrape]:
        return [one for one in self._history if one.at > self._at - seconds]

    def _rate(self, series: Series, seconds: float) -> float | None:
        """As Prometheus' rate(): the rise, carried on to the ends of the window where scrapes are near them, over its length."""
        if len(series) < 2:
            return None
        (first_at, first), (last_at, _) = series[0], series[-1]
        rise, span = _rise(series), last_at - first_at
        near = 1.1 * span / (len(series) - 1)
        before, after = first_at - (self._at - seconds), self._at - last_at
        before, after = (gap if gap < near else near / 2.2 for gap in (before, after))
        if rise > 0 and first >= 0:
            before = min(before, span * first / rise)
        return rise * (span + before + after) / span / seconds


def _rise(series: Series) -> float:
    """How much a counter rose, its restarts included."""
    return sum(after - before if after >= before else after for (_, before), (_, after) in pairwise(series))


def _inter_token(recent: Sequence[Scrape], quantile: float) -> float:
    """As histogram_quantile: linear inside the bucket; 0 where nothing was counted."""
    routers = [one.router.inter_token for one in recent if one.router is not None]
    counts = [last - first for first, last in zip(routers[0], routers[-1], strict=True)]
    if not counts[-1]:
        return 0.0
    rank = quantile * counts[-1]
    lower, below = 0.0, 0
    for bound, count in zip(INTER_TOKEN_S, counts, strict=False):
        if count >= rank:
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return INTER_TOKEN_S[-1]

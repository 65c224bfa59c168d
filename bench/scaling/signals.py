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
    """Of one member: share of KV pages used or promised, open seats."""

    kv_reserved: float
    seats: float


@dataclass(frozen=True, slots=True)
class RouterScrape:
    """Of all routers: members that take work, by pool; requests and prompt tokens that wait; requests that run; inter-token times
    since the start, as cumulative counts of telemetry.buckets.INTER_TOKEN_S and all."""

    members: Mapping[str, int]
    queued_tokens: float = 0
    queued_requests: float = 0
    running_requests: float = 0
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
    """As bench.scaling.queries.Scope; `seconds` of rates."""

    seconds: float = 60.0
    quantile: float = 0.95
    started: float = 0.5


def signals(history: Sequence[Scrape], window: Window) -> dict[str, float | None]:
    """The answers now, by pool and name joined by a dot; None where there is none. The last scrape is now."""
    now, recent = history[-1], [one for one in history if one.at > history[-1].at - window.seconds]
    router = now.router
    if router is None:
        return dict.fromkeys(("prefill.backlog", "prefill.busy", "decode.kv", "decode.sequences", "decode.interToken"))
    found: dict[str, float | None] = {}
    busy = _busy(recent)
    if now.prefill:
        factor = max(1.0, router.members["prefill"] / len(now.prefill))
        counts = busy is not None and busy >= window.started * len(now.prefill)
        waiting = sum(one.waiting_tokens for one in now.prefill.values())
        found["prefill.backlog"] = waiting * factor + (router.queued_tokens if counts else 0.0)
        found["prefill.busy"] = None if busy is None else busy * factor
    else:
        found["prefill.backlog"] = found["prefill.busy"] = None
    if now.decode:
        factor = max(1.0, router.members["decode"] / len(now.decode))
        reserved = sum(one.kv_reserved for one in now.decode.values())
        queued = router.queued_requests if reserved >= window.started * len(now.decode) else 0.0
        found["decode.kv"] = reserved * factor
        found["decode.sequences"] = sum(one.seats for one in now.decode.values()) * factor + queued
    else:
        found["decode.kv"] = found["decode.sequences"] = None
    found["decode.interToken"] = _inter_token(recent, window.quantile) * router.members["decode"]
    return found


def _busy(recent: Sequence[Scrape]) -> float | None:
    """Members' worth of computing, of each member from its first scrape in the window to its last."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for scrape in recent:
        for name, one in scrape.prefill.items():
            seen.setdefault(name, []).append((scrape.at, one.step_seconds))
    rates = [_rise(series) / (series[-1][0] - series[0][0]) for series in seen.values() if len(series) > 1]
    return sum(rates) if rates else None


def _rise(series: Sequence[tuple[float, float]]) -> float:
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

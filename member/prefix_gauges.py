"""The prefix cache of a member as its metrics and its description show it."""

from engine.prefixes import PrefixStatistics
from lifecycle.prefix_keys import PrefixKeys
from telemetry.prefix_metrics import PrefixGauges


def prefix_gauges(now: PrefixStatistics) -> PrefixGauges:
    """The gauges of these statistics."""
    return PrefixGauges(now.indexed_pages, now.hit_pages, now.missed_pages, now.stored_pages, now.evicted_pages)


def identity_of(keys: PrefixKeys | None) -> bytes:
    """What routers begin the keys of prompts with; empty where nothing is kept."""
    return b"" if keys is None else keys.identity

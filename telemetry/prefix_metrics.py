"""What a member measures of its prefix cache; the same names in both pools."""

from dataclasses import dataclass

from telemetry.registry import Computed, Samples


@dataclass(frozen=True, slots=True)
class PrefixGauges:
    """Pages that can be found now; since the start: pages found and not found, that became findable, and given up for room."""

    indexed_pages: float = 0
    hit_pages: float = 0
    missed_pages: float = 0
    stored_pages: float = 0
    evicted_pages: float = 0


def prefix_computed(pool: str) -> tuple[Computed, ...]:
    """Declared for one pool."""
    return (
        Computed(f"{pool}_prefix_indexed_pages", "KV pages whose content can be found again."),
        Computed(f"{pool}_prefix_pages_total", "Pages of prompts looked for in the cache, by result.", "result", counter=True),
        Computed(f"{pool}_prefix_stored_pages_total", "KV pages that became findable.", counter=True),
        Computed(f"{pool}_prefix_evicted_pages_total", "Cached KV pages given up for room.", counter=True),
    )


def prefix_samples(pool: str, now: PrefixGauges) -> Samples:
    """Their values."""
    return {
        f"{pool}_prefix_indexed_pages": now.indexed_pages,
        f"{pool}_prefix_pages_total": {"hit": now.hit_pages, "missed": now.missed_pages},
        f"{pool}_prefix_stored_pages_total": now.stored_pages,
        f"{pool}_prefix_evicted_pages_total": now.evicted_pages,
    }

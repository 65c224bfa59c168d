"""What a decode member holds and has counted, at one moment: for Watch and for gauges. Made by the engine thread, read by all."""

from collections.abc import Mapping
from dataclasses import dataclass

from decode_svc.scheduler import Load, Scheduler
from kv_transfer.grants import ReaderStatistics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`pages`: by state, all groups. Recent: decode_step_s, prompt_tokens_per_s. Counts are since the start."""

    load: Load
    pages: Mapping[str, int]
    pages_total: int
    landing_rows_used: int
    seats: int
    grants: ReaderStatistics
    drains_asked: int
    drains_silent: int
    fences_proven: int
    decode_step_s: float
    prompt_tokens_per_s: float


def take_snapshot(scheduler: Scheduler, decode_step_s: float, prompt_tokens_per_s: float) -> Snapshot:
    """What is so now; called between two steps."""
    counts = scheduler.memory.counts()
    handovers = scheduler.handovers
    return Snapshot(
        load=scheduler.load(),
        pages={
            "free": counts.free,
            "owned": counts.owned,
            "cached": counts.cached,
            "granted": counts.granted,
            "quarantined": counts.quarantined,
        },
        pages_total=counts.total,
        landing_rows_used=scheduler.memory.landing_rows_used,
        seats=len(scheduler.seats),
        grants=handovers.book.statistics(),
        drains_asked=handovers.counts.drains_asked,
        drains_silent=handovers.counts.drains_silent,
        fences_proven=handovers.counts.fences_proven,
        decode_step_s=decode_step_s,
        prompt_tokens_per_s=prompt_tokens_per_s,
    )

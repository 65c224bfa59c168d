"""What a decode member holds and has counted, at one moment: for Watch and for gauges. Made by the engine thread, read by all."""

from collections.abc import Mapping
from dataclasses import dataclass

from decode_svc.load import Load
from decode_svc.scheduler import Scheduler
from engine.prefixes import PrefixStatistics
from kv_transfer.grants import ReaderStatistics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`pages`: by state, all groups. Recent: decode_step_s, prompt_tokens_per_s. Counts are since the start; `selected_tokens`:
    chosen, drafts that were right included.

    oldest_grant_at: when the oldest open grant was reserved, in monotonic seconds.
    """

    load: Load
    pages: Mapping[str, int]
    pages_total: int
    landing_rows_used: int
    seats: int
    grants: ReaderStatistics
    oldest_grant_at: float | None
    drains_asked: int
    drains_silent: int
    fences_proven: int
    pushes_in_flight: int
    host_pages_used: int
    preemptions: Mapping[str, int]
    swapped_bytes: Mapping[str, int]
    dropped_tokens: int
    draft_tokens: Mapping[str, int]
    drafting_off: int
    drafted_tokens: Mapping[str, int]
    accepted_drafts: Mapping[str, int]
    draft_pages_used: int
    prefixes: PrefixStatistics
    decode_step_s: float
    prompt_tokens_per_s: float
    selected_tokens: int = 0


def take_snapshot(scheduler: Scheduler, decode_step_s: float, prompt_tokens_per_s: float, drawn_tokens: int = 0) -> Snapshot:
    """What is so now; called between two steps. `drawn_tokens`: chosen since the start, without drafts."""
    counts = scheduler.memory.counts()
    handovers, preemption = scheduler.handovers, scheduler.preemption.counts
    drafts = scheduler.speculation.counts_by_origin()
    return Snapshot(
        load=scheduler.load(),
        pages={
            "free": counts.free,
            "owned": counts.owned,
            "cached": counts.cached,
            "granted": counts.granted,
            "quarantined": counts.quarantined,
            "pinned": counts.pinned,
        },
        pages_total=counts.total,
        landing_rows_used=scheduler.memory.landing_rows_used,
        seats=len(scheduler.seats),
        grants=handovers.book.statistics(),
        oldest_grant_at=handovers.oldest_reserved_at,
        drains_asked=handovers.counts.drains_asked,
        drains_silent=handovers.counts.drains_silent,
        fences_proven=handovers.counts.fences_proven,
        pushes_in_flight=scheduler.pushes.in_flight,
        host_pages_used=scheduler.memory.host.used,
        preemptions={kind.value: count for kind, count in preemption.preempted.items()},
        swapped_bytes={kind.value: count for kind, count in preemption.swapped_bytes.items()},
        dropped_tokens=preemption.dropped_tokens,
        draft_tokens={
            "drafted": scheduler.speculation.counts.drafted_tokens,
            "accepted": scheduler.speculation.counts.accepted_tokens,
        },
        drafting_off=scheduler.speculation.sequences_off,
        drafted_tokens={origin.value: counts.drafted_tokens for origin, counts in drafts.items()},
        accepted_drafts={origin.value: counts.accepted_tokens for origin, counts in drafts.items()},
        draft_pages_used=scheduler.speculation.model_pages,
        prefixes=scheduler.memory.prefixes.statistics(),
        decode_step_s=decode_step_s,
        prompt_tokens_per_s=prompt_tokens_per_s,
        selected_tokens=drawn_tokens + scheduler.speculation.counts.accepted_tokens,
    )

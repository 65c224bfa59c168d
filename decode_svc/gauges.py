"""The gauges of a decode member, from its last snapshot."""

from decode_svc.snapshot import Snapshot
from member.prefix_gauges import prefix_gauges
from telemetry.decode_metrics import DecodeGauges


def gauges(
    now: Snapshot | None,
    *,
    stream_buffer_bytes: int,
    slow_readers: int,
    seats_held: int,
    replay_bytes: int,
    receiving_agents: int,
    remote_agents: int,
    inbox_messages: int,
    grammars: tuple[int, int],
    engine_busy_ratio: float,
) -> DecodeGauges:
    """What is shown; before the first snapshot only what the event loop knows. `grammars`: how many are kept, and their bytes."""
    if now is None:
        return DecodeGauges(inbox_messages=inbox_messages, receiving_agents=receiving_agents)
    grants = now.grants
    return DecodeGauges(
        running_sequences=now.load.running - now.load.paused,
        paused_sequences=now.load.paused,
        waiting_sequences=now.load.waiting,
        waiting_tokens=now.load.waiting_tokens,
        preempted_sequences=now.load.preempted,
        host_pages=now.host_pages_used,
        pages=now.pages,
        kv_used_ratio=1 - (now.pages["free"] + now.pages["cached"]) / now.pages_total if now.pages_total else 0.0,
        kv_reserved_ratio=1 - now.load.free_pages / now.pages_total if now.pages_total else 0.0,
        open_grants=now.load.grants_open,
        landing_rows=now.landing_rows_used,
        seats=now.seats,
        stream_buffer_bytes=stream_buffer_bytes,
        slow_readers=slow_readers,
        seats_held=seats_held,
        replay_bytes=replay_bytes,
        receiving_agents=receiving_agents,
        remote_agents=remote_agents,
        moving_sequences=now.load.moving,
        pushes_in_flight=now.pushes_in_flight,
        inbox_messages=inbox_messages,
        grammars=grammars[0],
        grammar_bytes=grammars[1],
        engine_busy_ratio=engine_busy_ratio,
        grants=_grants(now),
        stray_notices={**grants.unknown, **grants.refusals, "duplicate": grants.duplicate_parts},
        silent_drains=now.drains_silent,
        fences=now.fences_proven,
        preemptions=now.preemptions,
        swapped_bytes=now.swapped_bytes,
        dropped_tokens=now.dropped_tokens,
        draft_tokens=now.draft_tokens,
        drafting_off_sequences=now.drafting_off,
        drafted_tokens=now.drafted_tokens,
        accepted_drafts=now.accepted_drafts,
        draft_pages=now.draft_pages_used,
        cached_tokens=now.prefixes.hit_tokens,
        prefix=prefix_gauges(now.prefixes),
    )


def _grants(now: Snapshot) -> dict[str, float]:
    """What became of them, as DecodeGauges.grants."""
    grants = now.grants
    return {
        "offered": grants.offers,
        "committed": grants.commits,
        "reclaimed": grants.reclaimed - grants.fenced,
        "fenced": grants.fenced,
    }

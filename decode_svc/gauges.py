"""The gauges of a decode member, from its last snapshot."""

from decode_svc.snapshot import Snapshot
from telemetry.decode_metrics import DecodeGauges


def gauges(
    now: Snapshot | None,
    *,
    stream_buffer_bytes: int,
    slow_readers: int,
    receiving_agents: int,
    inbox_messages: int,
    engine_busy_ratio: float,
) -> DecodeGauges:
    """What is shown; before the first snapshot only what the event loop knows."""
    if now is None:
        return DecodeGauges(inbox_messages=inbox_messages, receiving_agents=receiving_agents)
    grants = now.grants
    return DecodeGauges(
        running_sequences=now.load.running - now.load.paused,
        paused_sequences=now.load.paused,
        waiting_sequences=now.load.waiting,
        pages=now.pages,
        kv_used_ratio=1 - now.pages["free"] / now.pages_total if now.pages_total else 0.0,
        open_grants=now.load.grants_open,
        landing_rows=now.landing_rows_used,
        seats=now.seats,
        stream_buffer_bytes=stream_buffer_bytes,
        slow_readers=slow_readers,
        receiving_agents=receiving_agents,
        inbox_messages=inbox_messages,
        engine_busy_ratio=engine_busy_ratio,
        grants={
            "offered": grants.offers,
            "committed": grants.commits,
            "reclaimed": grants.reclaimed - grants.fenced,
            "fenced": grants.fenced,
        },
        stray_notices={**grants.unknown, **grants.refusals, "duplicate": grants.duplicate_parts},
        silent_drains=now.drains_silent,
        fences=now.fences_proven,
    )

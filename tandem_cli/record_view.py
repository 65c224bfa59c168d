"""A request's record as JSON and as a timeline."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import label

_PHASES = (
    ("check_s", "request checked"),
    ("queue_s", "waiting for budget"),
    ("prefill_queue_s", "waiting for the prefill member"),
    ("prefill_s", "prompt computed"),
    ("handover_s", "pages handed over"),
    ("handover_exposed_s", "  of it after the last chunk"),
    ("decode_s", "tokens generated"),
    ("stop_hold_s", "  longest hold for a stop"),
    ("send_s", "  writing to the client"),
    ("first_token_s", "first token after"),
    ("total_s", "in all"),
    ("cancel_observed_s", "cancel seen after"),
    ("cancel_effective_s", "cancel effective after"),
)


def as_dict(message: Any) -> dict[str, Any]:
    """Any message in protobuf's JSON mapping (64-bit numbers are strings there) with the names of the .proto file."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def timings_table(timings: pb.Timings) -> Table:
    """Phases of a request in milliseconds; phases that did not happen are left out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("phase")
    table.add_column("ms", justify="right")
    for name, words in _PHASES:
        seconds = getattr(timings, name)
        if seconds:
            table.add_row(words, f"{seconds * 1e3:,.1f} ms")
    return table


def ending_words(completed: pb.Completed) -> str:
    """How a request ended, in words."""
    matched = f" {completed.matched_stop!r}" if completed.matched_stop else ""
    cause = f" ({completed.cause})" if completed.cause else ""
    return f"{label(pb.FinishReason, completed.finish_reason)}{matched}{cause}"


def rate_words(completed: pb.Completed) -> str:
    """Tokens per second after the first one; empty when there is no second."""
    gaps = completed.usage.selected_tokens - 1
    seconds = completed.timings.decode_s
    return f"{gaps / seconds:,.1f} tokens/s" if gaps > 0 and seconds > 0 else ""


def usage_line(usage: pb.Usage | None) -> str:
    """Token counts in one line; None when nobody knows them."""
    if usage is None:
        return "tokens: not known; the router that counted them was lost"
    return (
        f"tokens: prompt {usage.prompt_tokens} (cached {usage.cached_prompt_tokens}), selected {usage.selected_tokens}, "
        f"processed {usage.processed_tokens}, returned {usage.returned_tokens}, billed {usage.billed_tokens}"
    )


def timeline(record: pb.RequestRecord) -> RenderableType:
    """The record for people: who served it, every state with its time, how it ended, what it used and gave back."""
    head = Text.assemble((record.request_id, "bold"), f"  {label(pb.RequestState, record.state)}")
    if record.finish_reason:
        head.append(f", {label(pb.FinishReason, record.finish_reason)}")
    if record.cause:
        head.append(f" ({record.cause})")
    adapter = f"  adapter {record.adapter}" if record.adapter else ""
    lines: list[RenderableType] = [
        head,
        f"model {record.model} {record.model_snapshot[:12]}{adapter}  tenant {record.tenant}",
        f"attempt {record.attempt}  priority {record.priority}",
        f"router {record.router or '-'}  prefill {record.prefill_member or '-'}  decode {record.decode_member or '-'}",
        _transitions(record),
        usage_line(record.usage if record.HasField("usage") else None),
        timings_table(record.timings),
        f"sent {record.sent_bytes} bytes, held {record.held_bytes} bytes for a stop at the end",
    ]
    if record.HasField("cancel_requested_at"):
        lines.append(_cancel_line(record))
    if record.released:
        lines.append("released: " + ", ".join(f"{name} {count}" for name, count in sorted(record.released.items())))
    return Group(*lines)


def _transitions(record: pb.RequestRecord) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("after", justify="right")
    table.add_column("state")
    table.add_column("event")
    table.add_column("detail")
    start = record.transitions[0].at.ToNanoseconds() if record.transitions else 0
    for step in record.transitions:
        after_ms = (step.at.ToNanoseconds() - start) / 1e6
        attempt = f"attempt {step.attempt}" if step.attempt > 1 else ""
        table.add_row(f"+{after_ms:,.1f} ms", label(pb.RequestState, step.state), f"{step.event} {attempt}".strip(), step.detail)
    return table


def _cancel_line(record: pb.RequestRecord) -> str:
    requested = record.cancel_requested_at.ToNanoseconds()
    parts = [f"cancel requested ({record.cancel_reason or 'no reason given'})"]
    for name in ("cancel_observed_at", "cancel_effective_at"):
        if record.HasField(name):
            after_ms = (getattr(record, name).ToNanoseconds() - requested) / 1e6
            parts.append(f"{name.split('_')[1]} +{after_ms:,.1f} ms")
    return ", ".join(parts)

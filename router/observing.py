"""What an ended request leaves in the metrics."""

from lifecycle.finish import COMPLETE, is_failure
from lifecycle.record import RequestRecord
from lifecycle.states import State
from lifecycle.usage import Usage
from telemetry.router_metrics import PHASES, RouterMetrics

#: Only gaps between two outputs that somebody would look into point to their trace: there is one for every token.
NOTED_GAP_S = 0.1


def observe_gap(metrics: RouterMetrics, gap_s: float, traceparent: str) -> None:
    """Notes the time between two outputs of a stream, in seconds."""
    metrics.inter_token.observe(gap_s, traceparent=traceparent if gap_s >= NOTED_GAP_S else None)


def observe_end(metrics: RouterMetrics, record: RequestRecord) -> None:
    """Counts a record that has ended, once."""
    ending, usage, timings, trace = record.ending, record.usage, record.timings, record.traceparent
    if ending is None:
        return
    failed = record.state is State.FAILED
    metrics.requests.inc(1, (ending.cause.value if failed else "") or ending.reason.value)
    if is_failure(ending):
        metrics.failures.inc()
    if record.counted:
        _observe_usage(metrics, usage)
    metrics.sent_bytes.inc(record.sent_bytes)
    metrics.end_to_end.observe(timings.total_s, traceparent=trace)
    if timings.first_token_s:
        metrics.first_token.observe(timings.first_token_s, traceparent=trace)
    for phase in PHASES:
        metrics.phase.observe(getattr(timings, f"{phase}_s"), phase, traceparent=trace)
    if record.state is State.FINISHED and ending.reason in COMPLETE:
        metrics.goodput.inc()
        if usage.returned_tokens > 1:
            after_first_s = max(0.0, timings.total_s - timings.first_token_s)
            metrics.per_output_token.observe(after_first_s / (usage.returned_tokens - 1), traceparent=trace)
    if record.state is State.CANCELLED:
        metrics.cancels.inc(1, _cancelled_in(record))
        if timings.cancel_effective_s is not None:
            metrics.cancel_effective.observe(timings.cancel_effective_s, traceparent=trace)


def _observe_usage(metrics: RouterMetrics, usage: Usage) -> None:
    for kind, amount in (
        ("prompt", usage.prompt_tokens),
        ("cached", usage.cached_prompt_tokens),
        ("selected", usage.selected_tokens),
        ("processed", usage.processed_tokens),
        ("returned", usage.returned_tokens),
        ("billed", usage.billed_tokens),
    ):
        metrics.tokens.inc(amount, kind)
    metrics.prompt_tokens.observe(usage.prompt_tokens)
    metrics.output_tokens.observe(usage.returned_tokens)


def observe_before_begun(metrics: RouterMetrics, record: RequestRecord) -> None:
    """Counts a request whose cancel came first. It has no times; the cancel itself was counted when it came."""
    if record.ending is not None:
        metrics.requests.inc(1, record.ending.reason.value)


def _cancelled_in(record: RequestRecord) -> str:
    """The state in which the cancel met the request."""
    before = "created"
    for step in record.transitions:
        if step.state is State.CANCEL_REQUESTED:
            return before
        before = step.state.value
    return before

"""What is written down about seats and steps: metrics and spans, made from the engine's events on the event loop."""

import logging

from decode_svc.messages import PromptReady, SeatEnded, SeatEvent, SeatPushed, SeatReport
from decode_svc.streams import SeatOrigin
from decode_svc.worker import StepTimes
from lifecycle.finish import COMPLETE, Cause, Ending, FinishReason
from lifecycle.usage import Usage
from telemetry import names
from telemetry.decode_metrics import STEP_PARTS, DecodeMetrics
from telemetry.tracing import Attributes, SpanEvent, Tracing, unix_seconds

_LOG = logging.getLogger("decode")

#: Endings that are nobody's failure.
_GOOD = COMPLETE | {FinishReason.CANCELLED}


class Recorder:
    """Never raises into its caller: metrics and spans do not."""

    def __init__(self, metrics: DecodeMetrics, tracing: Tracing, member: str) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._member = member
        self._landing_bytes = 0

    def open(self, landing_bytes: int) -> None:
        """`landing_bytes`: of one row of logits."""
        self._landing_bytes = landing_bytes

    def event(self, event: SeatEvent, origin: SeatOrigin) -> None:
        """Note what an event says."""
        if isinstance(event, PromptReady):
            self._ready(event, origin)
        elif isinstance(event, SeatPushed):
            self._metrics.moves.inc(1, event.cause or "pushed")
            if not event.cause:
                self._metrics.moved_bytes.inc(event.sent_bytes)
                self._metrics.move.observe(event.handover_s, traceparent=origin.traceparent)
        elif isinstance(event, SeatEnded):
            self._ended(event, origin)

    def refused(self, reason: str) -> None:
        """A seat was refused."""
        self._metrics.refusals.inc(1, reason)

    def step(self, times: StepTimes) -> None:
        """One step."""
        metrics = self._metrics
        metrics.step.observe(times.total_s)
        parts = (times.plan_s, times.draft_s, times.model_s, times.sample_s, times.commit_s, times.publish_s)
        for name, seconds in zip(STEP_PARTS, parts, strict=True):
            metrics.step_part.observe(seconds, name)
        metrics.step_sequences.observe(times.sequences)
        metrics.step_tokens.observe(times.tokens)
        if times.masks is not None:
            metrics.grammar_masks.observe(times.masks.fill_s)
            metrics.grammar_wait.observe(times.masks.wait_s)

    def _ready(self, event: PromptReady, origin: SeatOrigin) -> None:
        if origin.prefill_member:
            self._metrics.handover.observe(event.handover_s, traceparent=origin.traceparent)
            self._metrics.received_bytes.inc(self._handover_bytes(origin, event.received_bytes))

    def _handover_bytes(self, origin: SeatOrigin, page_bytes: int) -> int:
        """What a whole hand-over writes here: pages, and a row of logits unless an output moved here."""
        return page_bytes if origin.moved else page_bytes + self._landing_bytes

    def _ended(self, event: SeatEnded, origin: SeatOrigin) -> None:
        ending, usage, report = event.ending, event.usage, event.report
        metrics = self._metrics
        if ending.cause is not Cause.MOVED:
            metrics.sequences.inc(1, ending.reason.value)
        elif report.paused_at is not None:
            metrics.move_pause.observe(report.ended_at - report.paused_at, traceparent=origin.traceparent)
        if ending.cause is Cause.GRAMMAR_FAILED:
            metrics.grammar_failures.inc()
        before = origin.usage()
        for kind, count in (
            ("selected", usage.selected_tokens - before.selected_tokens),
            ("returned", usage.returned_tokens - before.returned_tokens),
            ("billed", usage.billed_tokens - before.billed_tokens),
        ):
            metrics.tokens.inc(count, kind)
        metrics.stop_hold.observe(report.stop_hold_s, traceparent=origin.traceparent)
        if report.ready_at is not None and report.last_token_at is not None:
            metrics.decode.observe(report.last_token_at - report.ready_at, traceparent=origin.traceparent)
        if report.cancel_requested_at is not None and report.cancel_effective_at is not None:
            effective_s = max(0.0, report.cancel_effective_at - report.cancel_requested_at)
            metrics.cancel_effective.observe(effective_s, traceparent=origin.traceparent)
        self._spans(event, origin)
        _LOG.info(
            "attempt ended",
            extra={
                "request_id": origin.key.request_id,
                "attempt": origin.key.attempt,
                "finish_reason": ending.reason.value,
                "cause": ending.cause.value,
                "selected_tokens": usage.selected_tokens,
            },
        )

    def _spans(self, event: SeatEnded, origin: SeatOrigin) -> None:
        ending, report = event.ending, event.report
        parent = origin.traceparent or None
        ok = ending.reason in _GOOD
        error = "" if ok else ending.cause.value or ending.reason.value
        attempt: dict[str, str | int] = {
            names.REQUEST_ID: origin.key.request_id,
            names.ATTEMPT: origin.key.attempt,
            names.DECODE_MEMBER: self._member,
        }
        committed_at = report.ready_at
        if not report.prompt_here and report.granted_at is not None:
            begun_at = report.begun_at if report.begun_at is not None else report.granted_at
            ended_at = committed_at if committed_at is not None else report.ended_at
            written = {names.SENT_BYTES: self._handover_bytes(origin, report.received_bytes)} if committed_at is not None else {}
            self._tracing.span(
                names.SPAN_HANDOVER,
                parent=parent,
                start_s=unix_seconds(begun_at),
                end_s=unix_seconds(ended_at),
                attributes={**attempt, **written, names.PREFILL_MEMBER: origin.prefill_member},
                ok=ok or committed_at is not None,
                error_type=error,
            )
        self._tracing.span(
            names.SPAN_DECODE,
            parent=parent,
            start_s=unix_seconds(committed_at if committed_at is not None else report.opened_at),
            end_s=unix_seconds(report.ended_at),
            attributes={**attempt, **_outcome(ending, event.usage, report)},
            events=_moments(report),
            ok=ok,
            error_type=error,
        )


def _outcome(ending: Ending, usage: Usage, report: SeatReport) -> Attributes:
    return {
        names.FINISH_REASONS: [ending.reason.value],
        names.CAUSE: ending.cause.value,
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.OUTPUT_TOKENS: usage.selected_tokens,
        names.RETURNED_TOKENS: usage.returned_tokens,
        names.BILLED_TOKENS: usage.billed_tokens,
        names.HELD_BYTES: report.held_bytes,
        names.PAGES: report.released.get("pages", 0),
        names.PREEMPTIONS: report.preemptions,
    }


def _moments(report: SeatReport) -> list[SpanEvent]:
    moments = (
        (names.EVENT_COMMITTED, report.ready_at),
        (names.EVENT_FIRST_TOKEN, report.first_token_at),
        (names.EVENT_CANCEL_REQUESTED, report.cancel_requested_at),
        (names.EVENT_CANCEL_OBSERVED, report.cancel_observed_at),
        (names.EVENT_CANCEL_EFFECTIVE, report.cancel_effective_at),
    )
    return [SpanEvent(name, unix_seconds(at)) for name, at in moments if at is not None]

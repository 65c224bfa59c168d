"""One trace a request: Generate, with queue, prefill, handover, decode and send beneath it.

Each span is told by the process that did the work: prefill and hand-over to decode's end by the members, under Generate,
whose traceparent travels in the messages. The phases of the router are made from the record's transitions at the end.
"""

from collections.abc import Iterator

from lifecycle.finish import FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from router.progress import Progress
from router.request import ValidatedRequest
from telemetry import names
from telemetry.tracing import OpenSpan, Tracing, unix_seconds


def request_attributes(request: ValidatedRequest, operation: str) -> dict[str, str | int | float | bool]:
    """What is known of a request at its arrival; no text."""
    sampling = request.sampling
    unusual = {
        names.REQUEST_CHOICES: request.choices.told if request.choices.several else 0,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    return {
        **{name: value for name, value in unusual.items() if value},
        names.OPERATION: operation,
        names.PROVIDER: names.PROVIDER_TANDEM,
        names.REQUEST_MODEL: request.model.name,
        names.REQUEST_STREAM: True,
        names.REQUEST_MAX_TOKENS: request.max_output_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k,
        names.INPUT_TOKENS: request.prompt_tokens,
        names.REQUEST_ID: request.request_id,
        names.TENANT: request.tenant,
        names.PRIORITY: request.priority,
        names.MODEL_SNAPSHOT: request.model.snapshot,
    }


def end_spans(tracing: Tracing, root: OpenSpan, record: RequestRecord, progress: Progress) -> None:
    """Writes down the phases of a record that has ended, and ends its root span."""
    for start_s, end_s, attempt in _phases(record, State.QUEUED):
        tracing.span(names.SPAN_QUEUE, parent=root.traceparent, start_s=start_s, end_s=end_s, attributes={names.ATTEMPT: attempt})
    for start_s, end_s, attempt in _phases(record, State.DRAINING):
        tracing.span(names.SPAN_SEND, parent=root.traceparent, start_s=start_s, end_s=end_s, attributes={names.ATTEMPT: attempt})
    _end_root(root, record, progress)


def _end_root(root: OpenSpan, record: RequestRecord, progress: Progress) -> None:
    ending, usage = record.ending, record.usage
    reason = ending.reason if ending else FinishReason.TRANSPORT_ERROR
    root.set(
        {
            names.RESPONSE_ID: record.request_id,
            names.STATE: record.state.value,
            names.FINISH_REASONS: [reason.value],
            names.CAUSE: ending.cause.value if ending else "",
            names.ATTEMPT: record.attempt,
            names.OUTPUT_TOKENS: usage.returned_tokens,
            names.SELECTED_TOKENS: usage.selected_tokens,
            names.CACHED_INPUT_TOKENS: usage.cached_prompt_tokens,
            names.TIME_TO_FIRST_CHUNK: record.timings.first_token_s,
            names.PREFILL_MEMBER: record.prefill_member,
            names.DECODE_MEMBER: record.decode_member,
        }
    )
    if progress.first_token_at:
        root.event(names.EVENT_FIRST_TOKEN, at_s=unix_seconds(progress.first_token_at))
    for name, at in (
        (names.EVENT_CANCEL_REQUESTED, record.cancel_requested_at),
        (names.EVENT_CANCEL_OBSERVED, record.cancel_observed_at),
        (names.EVENT_CANCEL_EFFECTIVE, record.cancel_effective_at),
    ):
        if at is not None:
            root.event(name, at_s=at)
    failed = record.state is State.FAILED
    root.end(ok=not failed, error_type=(ending.cause.value or reason.value) if failed and ending else "")


def _phases(record: RequestRecord, state: State) -> Iterator[tuple[float, float, int]]:
    """Start, end and attempt of each stay in `state`."""
    steps = record.transitions
    for index, step in enumerate(steps):
        if step.state is state:
            # Events without a change of place (a cancel seen) end the stay too: what follows is clean-up.
            end_s = steps[index + 1].at if index + 1 < len(steps) else step.at
            yield step.at, end_s, step.attempt

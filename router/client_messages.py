"""What a router says to clients, made from its own values: events of a stream and records."""

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from lifecycle.finish import Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from lifecycle.usage import Timings, Usage
from router.request import ValidatedRequest
from tandem.v1 import inference_pb2 as pb

STATES: dict[State, Any] = {state: pb.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in State}
REASONS: dict[FinishReason, Any] = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def started(request: ValidatedRequest, sequence_no: int) -> bytes:
    """The first event."""
    event = pb.Started(
        request_id=request.request_id,
        model=request.model.name,
        model_snapshot=request.model.snapshot,
        seed=request.sampling.seed,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
    )
    return pb.GenerateResponse(sequence_no=sequence_no, started=event).SerializeToString()


def completed(record: RequestRecord, sequence_no: int, text: str, returned: bytes = b"") -> bytes:
    """The terminal event of a record that has ended; `returned`: the rest of the output, as in SeatEnd."""
    ending = record.ending or Ending(FinishReason.TRANSPORT_ERROR)
    event = pb.Completed(
        finish_reason=REASONS[ending.reason],
        state=STATES[record.state],
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        usage=usage_message(record.usage) if record.counted else None,
        timings=timings_message(record.timings),
        text=text,
        cause=ending.cause.value,
    )
    if returned:
        event.MergeFromString(returned)
    return pb.GenerateResponse(sequence_no=sequence_no, completed=event).SerializeToString()


def usage_message(usage: Usage) -> Any:
    """Counts."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        selected_tokens=usage.selected_tokens,
        processed_tokens=usage.processed_tokens,
        returned_tokens=usage.returned_tokens,
        billed_tokens=usage.billed_tokens,
    )


def timings_message(timings: Timings) -> Any:
    """Times in seconds."""
    return pb.Timings(
        check_s=timings.check_s,
        queue_s=timings.queue_s,
        prefill_queue_s=timings.prefill_queue_s,
        prefill_s=timings.prefill_s,
        handover_s=timings.handover_s,
        handover_exposed_s=timings.handover_exposed_s,
        decode_s=timings.decode_s,
        stop_hold_s=timings.stop_hold_s,
        send_s=timings.send_s,
        first_token_s=timings.first_token_s,
        total_s=timings.total_s,
        cancel_observed_s=timings.cancel_observed_s,
        cancel_effective_s=timings.cancel_effective_s,
    )


def record_message(record: RequestRecord) -> Any:
    """A record as clients read it."""
    ending = record.ending
    return pb.RequestRecord(
        request_id=record.request_id,
        tenant=record.tenant,
        model=record.model,
        model_snapshot=record.model_snapshot,
        adapter=record.adapter,
        state=STATES[record.state],
        attempt=record.attempt,
        priority=record.priority,
        router=record.router,
        prefill_member=record.prefill_member,
        decode_member=record.decode_member,
        transitions=[
            pb.Transition(
                state=STATES[one.state],
                at=timestamp(one.at),
                event=one.event.value if one.event else "",
                attempt=one.attempt,
                detail=one.detail,
            )
            for one in record.transitions
        ],
        finish_reason=REASONS[ending.reason] if ending else pb.FINISH_REASON_UNSPECIFIED,
        cause=ending.cause.value if ending else "",
        usage=usage_message(record.usage) if record.counted else None,
        timings=timings_message(record.timings),
        sent_bytes=record.sent_bytes,
        held_bytes=record.held_bytes,
        cancel_requested_at=timestamp(record.cancel_requested_at),
        cancel_observed_at=timestamp(record.cancel_observed_at),
        cancel_effective_at=timestamp(record.cancel_effective_at),
        cancel_reason=record.cancel_reason,
        released=record.released,
        traceparent=record.traceparent,
        terminal_sequence_no=record.terminal_sequence_no or 0,
    )


def timestamp(at: float | None) -> Timestamp | None:
    """Seconds since the epoch as a Timestamp; None stays None."""
    if at is None:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(round(at * 1e9))
    return stamp

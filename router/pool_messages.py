"""What a router says to members and hears from them, as messages of the pools' port and as its own values."""

import logging
from dataclasses import dataclass
from typing import Any

from lifecycle.deadlines import Deadlines
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage
from router.member_link import Member
from router.request import OutputMode, Utf8Policy, ValidatedRequest
from tandem.pools.v1 import decode_pb2, grant_pb2, prefill_pb2
from tandem.v1 import inference_pb2 as pb

_log = logging.getLogger(__name__)

_OUTPUT_MODES = {OutputMode.DELTA: pb.OUTPUT_MODE_DELTA, OutputMode.FINAL_ONLY: pb.OUTPUT_MODE_FINAL_ONLY}
_UTF8_POLICIES = {
    Utf8Policy.UNSET: pb.UTF8_POLICY_UNSPECIFIED,
    Utf8Policy.ERROR: pb.UTF8_POLICY_ERROR,
    Utf8Policy.DROP: pb.UTF8_POLICY_DROP,
}
_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What every message of one attempt carries."""

    key: AttemptKey
    request: ValidatedRequest
    deadlines: Deadlines
    traceparent: str
    now: float


@dataclass(frozen=True, slots=True)
class SeatEnd:
    """How an attempt ended at its decode member."""

    ending: Ending
    usage: Usage
    text: str = ""
    decode_s: float = 0.0
    stop_hold_s: float = 0.0
    held_bytes: int = 0
    cancel_observed_s: float | None = None
    cancel_effective_s: float | None = None
    released: tuple[tuple[str, int], ...] = ()


def open_message(dispatch: Dispatch, decode: Member, prefill: Member | None, first_sequence_no: int) -> Any:
    """The first message of a seat; with `prefill` None the decode member computes the prompt itself."""
    request, deadlines, now = dispatch.request, dispatch.deadlines, dispatch.now
    return decode_pb2.Open(
        key=_key(dispatch.key),
        model_snapshot=request.model.snapshot,
        incarnation=decode.info.incarnation,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling(request),
        stop=_stop(request),
        max_output_tokens=request.max_output_tokens,
        output_mode=_OUTPUT_MODES[request.output_mode],
        utf8_policy=_UTF8_POLICIES[request.utf8_policy],
        priority=request.priority,
        first_sequence_no=first_sequence_no,
        first_token_remaining_s=deadlines.remaining(now, deadlines.limits.first_token_s),
        inter_token_s=deadlines.limits.inter_token_s,
        overall_remaining_s=deadlines.remaining(now, deadlines.limits.overall_s),
        prefill=None if prefill is None else _peer(prefill),
        traceparent=dispatch.traceparent,
    )


def prefill_message(dispatch: Dispatch, prefill: Member, grant: Any) -> Any:
    """The one message of a prefill."""
    request, deadlines, now = dispatch.request, dispatch.deadlines, dispatch.now
    limits = [deadlines.limits.first_token_s, deadlines.limits.overall_s]
    left = [one for one in (deadlines.remaining(now, limit) for limit in limits) if one is not None]
    return prefill_pb2.PrefillRequest(
        key=_key(dispatch.key),
        model_snapshot=request.model.snapshot,
        prompt_token_ids=request.prompt_token_ids,
        grant=grant,
        priority=request.priority,
        remaining_s=min(left, default=None),
        traceparent=dispatch.traceparent,
        incarnation=prefill.info.incarnation,
    )


def seat_end(ended: Any) -> SeatEnd:
    """What an Ended says. A reason that is none is a fault of the member and ends as a transport error."""
    reason = _REASONS.get(ended.finish_reason, FinishReason.TRANSPORT_ERROR)
    try:
        cause = Cause(ended.cause)
    except ValueError:
        _log.error("a decode member ended with the unknown cause %r", ended.cause[:64])
        cause = Cause.NONE
    usage = ended.usage
    return SeatEnd(
        ending=Ending(
            reason,
            cause,
            matched_stop=ended.matched_stop,
            matched_token_id=ended.matched_token_id if ended.HasField("matched_token_id") else None,
        ),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            selected_tokens=usage.selected_tokens,
            processed_tokens=usage.processed_tokens,
            returned_tokens=usage.returned_tokens,
            billed_tokens=usage.billed_tokens,
        ),
        text=ended.text,
        decode_s=ended.decode_s,
        stop_hold_s=ended.stop_hold_s,
        held_bytes=ended.held_bytes,
        cancel_observed_s=ended.cancel_observed_s if ended.HasField("cancel_observed_s") else None,
        cancel_effective_s=ended.cancel_effective_s if ended.HasField("cancel_effective_s") else None,
        released=tuple(sorted(ended.released.items())),
    )


def _key(key: AttemptKey) -> Any:
    return grant_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt)


def _peer(member: Member) -> Any:
    info = member.info
    return grant_pb2.Peer(member=info.name, incarnation=info.incarnation, address=info.address)


def _sampling(request: ValidatedRequest) -> Any:
    """Every optional field is set: a member never fills in defaults of its own."""
    values = request.sampling
    return pb.SamplingParams(
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        repetition_penalty=values.repetition_penalty,
        presence_penalty=values.presence_penalty,
        frequency_penalty=values.frequency_penalty,
        logit_bias=dict(values.logit_bias),
        seed=values.seed,
    )


def _stop(request: ValidatedRequest) -> Any:
    values = request.stop
    return pb.StopParams(
        sequences=values.sequences,
        token_ids=values.token_ids,
        include_stop=values.include_stop,
        ignore_eos=values.ignore_eos,
        min_output_tokens=values.min_output_tokens,
    )

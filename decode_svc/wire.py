"""Between decode.proto and the values inside: an Open becomes checked values or a list of violations, events become responses."""

import math
from dataclasses import dataclass
from typing import Any

from decode_svc.admission import Identity
from decode_svc.messages import PromptReady, SeatEnded, SeatGranted, SeatRefused
from decode_svc.stream_log import Published
from engine.sampling_params import BadSamplingParams, SamplingParams
from engine.sequence import SequenceSpec, StopSpec
from kv_transfer.offer import BadGrant, Peer, grant_to_proto, peer_from_proto
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from rpc.status import Violation, invalid_argument
from tandem.pools.v1 import decode_pb2 as pb
from tandem.v1 import inference_pb2 as v1
from text.detokeniser import Utf8Policy
from text.errors import InvalidStops
from text.stop_matcher import StopRules

REQUEST_ID_BYTES_MAX = 128
STOP_TOKEN_IDS_MAX = 64
#: Priorities are from minus this to this.
PRIORITY_MOST = 10
#: Longest duration of a clock, in seconds: a week.
CLOCK_S_MAX = 7 * 24 * 3600.0

FINISH_REASONS = {reason: getattr(v1, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
UTF8_POLICIES = {v1.UTF8_POLICY_ERROR: Utf8Policy.ERROR, v1.UTF8_POLICY_DROP: Utf8Policy.DROP}

#: Labels of CancelSeat.reason.
CANCEL_ENDINGS = {
    "cancelled": Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL),
    "client_gone": Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE),
    "deadline_exceeded": Ending(FinishReason.DEADLINE_EXCEEDED, Cause.RPC_DEADLINE),
}

_CAUSES = {cause.value: cause for cause in Cause if cause is not Cause.NONE}


@dataclass(frozen=True, slots=True)
class Request:
    """A checked Open. The spec's context is the model's; whether prompt and output fit into it was asked before."""

    spec: SequenceSpec
    limits: Limits
    priority: int
    sends_output: bool
    prefill: Peer | None
    first_sequence_no: int
    traceparent: str


class _Checks:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def require(self, condition: bool, field: str, description: str, reason: str = "OUT_OF_LIMITS") -> None:
        if not condition:
            self.violations.append(Violation(f"open.{field}", description, reason))

    def end(self) -> None:
        """Raises StatusError when anything was wrong."""
        if self.violations:
            raise invalid_argument(self.violations, "BAD_OPEN")


def cancel_ending(message: pb.CancelSeat) -> Ending:
    """What a seat ends with; a label that is not known counts as a client's cancel."""
    return CANCEL_ENDINGS.get(message.reason, CANCEL_ENDINGS["cancelled"])


def loss_cause(message: pb.PrefillLost) -> Cause:
    """The cause that a failed hand-over is told with."""
    return _CAUSES.get(message.cause, Cause.PREFILL_FAILED)


def total_tokens(message: pb.Open) -> int:
    """Prompt and output together, in tokens."""
    return len(message.prompt_token_ids) + int(message.max_output_tokens)


def check_shape(message: pb.Open) -> None:
    """What every Open has, whatever member it means. Raises StatusError."""
    checks = _Checks()
    size = len(message.key.request_id.encode())
    checks.require(0 < size <= REQUEST_ID_BYTES_MAX, "key.request_id", f"must be 1 to {REQUEST_ID_BYTES_MAX} bytes, got {size}")
    checks.require(message.key.attempt >= 1, "key.attempt", "must be at least 1")
    checks.require(len(message.prompt_token_ids) > 0, "prompt_token_ids", "must have at least 1 token", "EMPTY_PROMPT")
    checks.require(message.max_output_tokens >= 1, "max_output_tokens", "must be at least 1")
    checks.end()


def parse_open(message: pb.Open, me: Identity, eos_ids: frozenset[int]) -> Request:
    """A checked Open. Raises StatusError (INVALID_ARGUMENT) naming every field that is wrong and its limit."""
    checks = _Checks()
    prompt = tuple(message.prompt_token_ids)
    highest = me.vocabulary_size - 1
    checks.require(max(prompt) <= highest, "prompt_token_ids", f"ids must be 0 to {highest}, got {max(prompt)}", "UNKNOWN_TOKEN")
    checks.require(message.HasField("prefill") or me.computes_prompts, "prefill", "must be set: this member computes no prompts")
    most = PRIORITY_MOST
    checks.require(-most <= message.priority <= most, "priority", f"must be -{most} to {most}, got {message.priority}")
    sampling = _sampling(message.sampling, highest, checks)
    stop = _stop(message.stop, eos_ids, highest, checks)
    limits = Limits(
        first_token_s=_seconds(message, "first_token_remaining_s", checks),
        inter_token_s=_seconds(message, "inter_token_s", checks),
        overall_s=_seconds(message, "overall_remaining_s", checks),
    )
    prefill = _prefill(message, checks)
    checks.end()
    assert sampling is not None and stop is not None
    spec = SequenceSpec(
        key=AttemptKey(message.key.request_id, message.key.attempt),
        index=0,
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=stop,
        max_output_tokens=message.max_output_tokens,
        context_tokens=me.context_tokens,
        utf8_policy=UTF8_POLICIES.get(message.utf8_policy),
    )
    return Request(
        spec=spec,
        limits=limits,
        priority=message.priority,
        sends_output=message.output_mode != v1.OUTPUT_MODE_FINAL_ONLY,
        prefill=prefill,
        first_sequence_no=message.first_sequence_no,
        traceparent=message.traceparent,
    )


def _sampling(message: Any, highest: int, checks: _Checks) -> SamplingParams | None:
    biased = max(message.logit_bias, default=0)
    checks.require(biased <= highest, "sampling.logit_bias", f"ids must be 0 to {highest}, got {biased}", "UNKNOWN_TOKEN")
    checks.require(message.HasField("seed"), "sampling.seed", "must be set: the router draws one", "NO_SEED")
    given = {name: getattr(message, name) for name in ("temperature", "top_p", "repetition_penalty") if message.HasField(name)}
    try:
        return SamplingParams(
            top_k=message.top_k,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            seed=message.seed,
            **given,
        )
    except BadSamplingParams as bad:
        checks.require(False, f"sampling.{bad.field}", str(bad))
        return None


def _stop(message: Any, eos_ids: frozenset[int], highest: int, checks: _Checks) -> StopSpec | None:
    ids = frozenset(message.token_ids)
    checks.require(
        len(message.token_ids) <= STOP_TOKEN_IDS_MAX,
        "stop.token_ids",
        f"must be at most {STOP_TOKEN_IDS_MAX}, got {len(message.token_ids)}",
    )
    checks.require(max(ids, default=0) <= highest, "stop.token_ids", f"ids must be 0 to {highest}", "UNKNOWN_TOKEN")
    try:
        rules = StopRules(tuple(text.encode() for text in message.sequences), message.include_stop)
    except InvalidStops as bad:
        checks.require(False, "stop.sequences", str(bad))
        return None
    return StopSpec(rules, ids, eos_ids, message.ignore_eos, message.min_output_tokens)


def _seconds(message: pb.Open, name: str, checks: _Checks) -> float | None:
    if not message.HasField(name):
        return None
    value = float(getattr(message, name))
    checks.require(math.isfinite(value) and 0 <= value <= CLOCK_S_MAX, name, f"must be 0 to {CLOCK_S_MAX:g} s, got {value}")
    return value


def _prefill(message: pb.Open, checks: _Checks) -> Peer | None:
    if not message.HasField("prefill"):
        return None
    try:
        return peer_from_proto(message.prefill)
    except BadGrant as bad:
        checks.require(False, f"prefill.{bad.field.removeprefix('peer.')}", bad.problem)
        return None


def granted(event: SeatGranted) -> pb.DecodeResponse:
    """The wire form."""
    grant = grant_to_proto(event.grant) if event.grant is not None else None
    return pb.DecodeResponse(granted=pb.Granted(grant=grant, cached_tokens=event.cached_tokens))


def refused(event: SeatRefused) -> pb.DecodeResponse:
    """The wire form."""
    return pb.DecodeResponse(refused=pb.Refused(reason=event.reason, detail=event.detail, retryable=event.retryable))


def committed(event: PromptReady) -> pb.DecodeResponse:
    """The wire form."""
    times = pb.Committed(handover_s=event.handover_s, compute_s=event.compute_s, queue_s=event.queue_s)
    return pb.DecodeResponse(committed=times)


def output(published: Published) -> pb.DecodeResponse:
    """The wire form: the client's event is serialised here, once, and never read again on the way."""
    delta = v1.Delta(text=published.text, token_ids=published.token_ids)
    return pb.DecodeResponse(
        output=pb.Output(
            response=v1.GenerateResponse(sequence_no=published.sequence_no, delta=delta).SerializeToString(),
            next_sequence_no=published.sequence_no + 1,
            selected_token_ids=published.selected_ids,
            text_bytes=published.text_bytes,
            returned_tokens=len(published.token_ids),
        )
    )


def ended(event: SeatEnded, next_sequence_no: int, text: str) -> pb.DecodeResponse:
    """The wire form. `text`: the whole text when nothing was sent before."""
    ending, usage, report = event.ending, event.usage, event.report
    decode_s = (report.last_token_at or 0.0) - (report.ready_at or 0.0) if report.last_token_at and report.ready_at else 0.0
    message = pb.Ended(
        finish_reason=FINISH_REASONS[ending.reason],
        cause=ending.cause.value,
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        usage=v1.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            selected_tokens=usage.selected_tokens,
            processed_tokens=usage.processed_tokens,
            returned_tokens=usage.returned_tokens,
            billed_tokens=usage.billed_tokens,
        ),
        text=text,
        next_sequence_no=next_sequence_no,
        decode_s=max(0.0, decode_s),
        stop_hold_s=report.stop_hold_s,
        held_bytes=report.held_bytes,
        cancel_observed_s=_since(report.cancel_requested_at, report.cancel_observed_at),
        cancel_effective_s=_since(report.cancel_requested_at, report.cancel_effective_at),
        released={**report.released, "streams": 1},
    )
    return pb.DecodeResponse(ended=message)


def _since(start: float | None, end: float | None) -> float | None:
    return max(0.0, end - start) if start is not None and end is not None else None

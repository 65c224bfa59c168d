"""What a router says to members and hears from them, as messages of the pools' port and as its own values."""

import logging
from dataclasses import dataclass
from typing import Any

from lifecycle.deadlines import Deadlines
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.prefix_keys import tenant_salt
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage
from router.member_link import Member
from router.request import OutputMode, SlowReader, Utf8Policy, ValidatedRequest
from tandem.pools.v1 import decode_pb2, grant_pb2, prefill_pb2
from tandem.v1 import inference_pb2 as pb
from text.grammar_rule import GrammarKind, GrammarRule

_log = logging.getLogger(__name__)

OUTPUT_MODES = {
    OutputMode.DELTA: pb.OUTPUT_MODE_DELTA,
    OutputMode.FINAL_ONLY: pb.OUTPUT_MODE_FINAL_ONLY,
    OutputMode.CUMULATIVE: pb.OUTPUT_MODE_CUMULATIVE,
}
UTF8_POLICIES = {
    Utf8Policy.UNSET: pb.UTF8_POLICY_UNSPECIFIED,
    Utf8Policy.ERROR: pb.UTF8_POLICY_ERROR,
    Utf8Policy.DROP: pb.UTF8_POLICY_DROP,
}
SLOW_READERS = {
    SlowReader.PAUSE: pb.SLOW_READER_PAUSE,
    SlowReader.COALESCE: pb.SLOW_READER_COALESCE,
    SlowReader.FAIL: pb.SLOW_READER_FAIL,
}
_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Resume:
    """What earlier attempts have brought: tokens chosen, bytes of text and tokens that the client's stream has got, the seconds
    since the last token (None when there was none), and log-probabilities of the tokens that the stream has not got.

    returned: with CUMULATIVE, all that the stream has got, as a serialised Delta. choices: with several outputs, in place of all
    that, a message for each of them.
    """

    output_token_ids: tuple[int, ...] = ()
    sent_text_bytes: int = 0
    returned_tokens: int = 0
    since_last_token_s: float | None = None
    held_log_probs: tuple[bytes, ...] = ()
    returned: bytes = b""
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What every message of one attempt carries."""

    key: AttemptKey
    request: ValidatedRequest
    deadlines: Deadlines
    traceparent: str
    now: float
    resume: Resume


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one of several outputs ended, with its counts. untold: the client is not told of it."""

    ending: Ending
    usage: Usage
    untold: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes for the client as they are, and what is counted about them. `held_log_probs`: of the last of `selected`, which are
    not returned yet, serialised; never read here. With several outputs `choice` says which, and `ended` how, with its last."""

    response: bytes
    next_sequence_no: int
    selected: tuple[int, ...]
    returned_tokens: int
    text_bytes: int
    held_log_probs: tuple[bytes, ...] = ()
    choice: int = 0
    ended: ChoiceEnd | None = None


@dataclass(frozen=True, slots=True)
class SeatEnd:
    """How an attempt ended at its decode member. `returned`: ids and log-probabilities of the whole output, as a serialised
    Completed, with FINAL_ONLY."""

    ending: Ending
    usage: Usage
    text: str = ""
    decode_s: float = 0.0
    stop_hold_s: float = 0.0
    held_bytes: int = 0
    cancel_observed_s: float | None = None
    cancel_effective_s: float | None = None
    released: tuple[tuple[str, int], ...] = ()
    last: Output | None = None
    returned: bytes = b""


def open_message(
    dispatch: Dispatch,
    decode: Member,
    prefill: Member | None,
    first_sequence_no: int,
    *,
    hold_s: float,
    moved: bool = False,
    most_computed_tokens: int | None = None,
) -> Any:
    """The first message of a seat; with `prefill` None the decode member computes the prompt itself.

    With `moved` it is a decode member that the sequence leaves. The seat outlives its stream by `hold_s`. `most_computed_tokens`:
    more than so many are not to be computed by the decode member.
    """
    request, deadlines, now, resume = dispatch.request, dispatch.deadlines, dispatch.now, dispatch.resume
    return decode_pb2.Open(
        key=_key(dispatch.key),
        model_snapshot=request.model.snapshot,
        incarnation=decode.info.incarnation,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling(request),
        stop=_stop(request),
        max_output_tokens=request.max_output_tokens,
        output_mode=OUTPUT_MODES[request.delivery.output_mode],
        utf8_policy=UTF8_POLICIES[request.utf8_policy],
        priority=request.priority,
        first_sequence_no=first_sequence_no,
        first_token_remaining_s=deadlines.remaining(now, deadlines.limits.first_token_s),
        inter_token_s=deadlines.limits.inter_token_s,
        overall_remaining_s=deadlines.remaining(now, deadlines.limits.overall_s),
        prefill=None if prefill is None else _peer(prefill),
        traceparent=dispatch.traceparent,
        slow_reader=SLOW_READERS[request.delivery.slow_reader],
        output_token_ids=resume.output_token_ids,
        sent_text_bytes=resume.sent_text_bytes,
        returned_tokens=resume.returned_tokens,
        since_last_token_s=resume.since_last_token_s,
        moved=moved,
        hold_s=hold_s,
        grammar=None if request.grammar is None else grammar_message(request.grammar),
        log_probabilities=_log_probabilities(request),
        held_log_probabilities=resume.held_log_probs,
        returned=resume.returned,
        echo_prompt=request.delivery.echo_prompt,
        tenant_salt=tenant_salt(request.tenant),
        most_computed_tokens=most_computed_tokens,
        adapter=_adapter(request),
        choices=resume.choices,
        told_choices=request.choices.told if request.choices.ranked else 0,
        ranks_only=request.choices.ranked and request.delivery.log_probs is None,
    )


def prefill_message(dispatch: Dispatch, prefill: Member, grant: Any) -> Any:
    """The one message of a prefill: the prompt and, when a decode member was lost, what had been chosen after it."""
    request, deadlines, now = dispatch.request, dispatch.deadlines, dispatch.now
    chosen = dispatch.resume.output_token_ids
    begun = bool(chosen) or dispatch.resume.since_last_token_s is not None
    limits = [deadlines.limits.overall_s, *([] if begun else [deadlines.limits.first_token_s])]
    left = [one for one in (deadlines.remaining(now, limit) for limit in limits) if one is not None]
    return prefill_pb2.PrefillRequest(
        key=_key(dispatch.key),
        model_snapshot=request.model.snapshot,
        prompt_token_ids=(*request.prompt_token_ids, *chosen),
        grant=grant,
        priority=request.priority,
        remaining_s=min(left, default=None),
        traceparent=dispatch.traceparent,
        incarnation=prefill.info.incarnation,
        tenant_salt=tenant_salt(request.tenant),
        adapter=_adapter(request),
    )


def _adapter(request: ValidatedRequest) -> Any:
    adapter = request.adapter
    return None if adapter is None else grant_pb2.Adapter(name=adapter.name, identity=adapter.identity)


def seat_end(ended: Any) -> SeatEnd:
    """What an Ended says. A reason that is none is a fault of the member and ends as a transport error."""
    return SeatEnd(
        ending=_ending(ended),
        usage=_usage(ended.usage),
        text=ended.text,
        decode_s=ended.decode_s,
        stop_hold_s=ended.stop_hold_s,
        held_bytes=ended.held_bytes,
        cancel_observed_s=ended.cancel_observed_s if ended.HasField("cancel_observed_s") else None,
        cancel_effective_s=ended.cancel_effective_s if ended.HasField("cancel_effective_s") else None,
        released=tuple(sorted(ended.released.items())),
        last=output(ended.last) if ended.HasField("last") else None,
        returned=ended.returned,
    )


def _ending(told: Any) -> Ending:
    reason = _REASONS.get(told.finish_reason, FinishReason.TRANSPORT_ERROR)
    try:
        cause = Cause(told.cause)
    except ValueError:
        _log.error("a decode member ended with the unknown cause %r", told.cause[:64])
        cause = Cause.NONE
    matched = told.matched_token_id if told.HasField("matched_token_id") else None
    return Ending(reason, cause, matched_stop=told.matched_stop, matched_token_id=matched)


def _usage(usage: Any) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        selected_tokens=usage.selected_tokens,
        processed_tokens=usage.processed_tokens,
        returned_tokens=usage.returned_tokens,
        billed_tokens=usage.billed_tokens,
    )


def choice_end(told: Any) -> ChoiceEnd:
    """What a ChoiceEnd says."""
    return ChoiceEnd(_ending(told), _usage(told.usage), told.untold)


def output(one: Any) -> Output:
    """What an Output says."""
    selected = tuple(one.selected_token_ids)
    held = tuple(one.held_log_probabilities)
    ended = choice_end(one.ended) if one.HasField("ended") else None
    return Output(one.response, one.next_sequence_no, selected, one.returned_tokens, one.text_bytes, held, one.choice, ended)


def held_after(before: tuple[bytes, ...], told: tuple[bytes, ...], unreturned: int) -> tuple[bytes, ...]:
    """Log-probabilities of the tokens that are not returned: the last ones, as tokens are returned in the order of choosing."""
    if not told and not before:
        return before
    held = before + told
    return held[max(0, len(held) - unreturned) :]


def adopt_message(key: AttemptKey, incarnation: str, next_sequence_no: int) -> Any:
    """Asks for the seat of an attempt, with all events from `next_sequence_no` on."""
    return decode_pb2.Adopt(key=_key(key), incarnation=incarnation, next_sequence_no=next_sequence_no)


def grammar_message(rule: GrammarRule) -> Any:
    """A rule as the ports write it."""
    if rule.kind is GrammarKind.JSON_OBJECT:
        return pb.Grammar(json_object=pb.JsonObject())
    written: Any = {rule.kind.value: rule.text}
    return pb.Grammar(**written)


def _key(key: AttemptKey) -> Any:
    return grant_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt)


def _peer(member: Member) -> Any:
    info = member.info
    return grant_pb2.Peer(member=info.name, incarnation=info.incarnation, address=info.address)


def _log_probabilities(request: ValidatedRequest) -> Any:
    delivery = request.delivery
    if delivery.log_probs is None:
        return pb.LogProbabilityParams() if request.choices.ranked else None
    return pb.LogProbabilityParams(top=delivery.log_probs, prompt=delivery.scores_prompt)


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

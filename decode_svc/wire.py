"""Between decode.proto and the values inside: an Open becomes checked values or a list of violations, events become responses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from decode_svc.admission import Identity
from decode_svc.flow import SlowReader
from decode_svc.wire_log_probs import from_router
from engine.log_probs import TokenLogProb
from engine.sampling_params import BadSamplingParams, SamplingParams
from engine.sequence import CanNotGoOn, Earlier, SequenceSpec, StopSpec
from kv_transfer.offer import BadGrant, Peer, peer_from_proto
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.prefix_keys import SALT_BYTES, adapted_salt
from lifecycle.record import AttemptKey
from member.adapters import adapter_of
from rpc.status import StatusError, Violation, invalid_argument
from tandem.pools.v1 import decode_pb2 as pb
from tandem.v1 import inference_pb2 as v1
from text.detokeniser import Utf8Policy
from text.errors import BadGrammar, InvalidStops
from text.grammar_rule import GrammarRule, rule_from
from text.stop_matcher import StopRules

REQUEST_ID_BYTES_MAX = 128
STOP_TOKEN_IDS_MAX = 64
#: Outputs of one prompt.
CHOICES_MAX = 128
#: Priorities are from minus this to this.
PRIORITY_MOST = 10
#: Number of a seat's first event when no attempt before it had told any; the prompt, when it is told, has it.
FIRST_SEQUENCE_NO = 1
#: Longest duration of a clock, in seconds: a week.
CLOCK_S_MAX = 7 * 24 * 3600.0

UTF8_POLICIES = {v1.UTF8_POLICY_ERROR: Utf8Policy.ERROR, v1.UTF8_POLICY_DROP: Utf8Policy.DROP}

SLOW_READERS = {v1.SLOW_READER_COALESCE: SlowReader.COALESCE, v1.SLOW_READER_FAIL: SlowReader.FAIL}

#: Which reason a cause in CancelSeat goes with; with every other one it is CANCELLED.
_CANCEL_REASONS = {
    **dict.fromkeys(
        (
            *(Cause.QUEUE_DEADLINE, Cause.FIRST_TOKEN_DEADLINE, Cause.OVERALL_DEADLINE, Cause.RPC_DEADLINE),
            *(Cause.INTER_TOKEN_ENGINE, Cause.INTER_TOKEN_BACKPRESSURE, Cause.INTER_TOKEN_NETWORK),
        ),
        FinishReason.DEADLINE_EXCEEDED,
    ),
    **dict.fromkeys((Cause.SHUTTING_DOWN, Cause.ROUTER_LOST, Cause.STORE_LOST), FinishReason.TRANSPORT_ERROR),
    Cause.SLOW_CONSUMER: FinishReason.SLOW_CONSUMER,
}

#: Names of the fields of Earlier in an Open.
_EARLIER_FIELDS = {"token_ids": "output_token_ids", "text_bytes": "sent_text_bytes", "returned_tokens": "returned_tokens"}

_CAUSES = {cause.value: cause for cause in Cause if cause is not Cause.NONE}


@dataclass(frozen=True, slots=True)
class Request:
    """A checked Open. The spec's context is the model's; whether prompt and output fit into it was asked before.

    choices: with several outputs of the prompt, one spec for each that has not ended; the first is `spec`, which no other one has
    fewer tokens of earlier attempts than.
    """

    spec: SequenceSpec
    limits: Limits
    priority: int
    sends_output: bool
    prefill: Peer | None
    first_sequence_no: int
    traceparent: str
    since_last_token_s: float | None
    moved: bool
    slow_reader: SlowReader
    hold_s: float
    grammar: GrammarRule | None
    salt: bytes
    most_computed_tokens: int | None
    choices: tuple[SequenceSpec, ...] = ()


class _Checks:
    """Collects what is wrong with a message."""

    def __init__(self, message: str = "open") -> None:
        self.violations: list[Violation] = []
        self._message = message

    def require(self, condition: bool, field: str, description: str, reason: str = "OUT_OF_LIMITS") -> None:
        if not condition:
            self.violations.append(Violation(f"{self._message}.{field}", description, reason))

    def end(self, reason: str = "BAD_OPEN") -> None:
        """Raises StatusError when anything was wrong."""
        if self.violations:
            raise invalid_argument(self.violations, reason)


def cancel_ending(message: pb.CancelSeat) -> Ending:
    """What a seat ends with; a label that is not known counts as a client's cancel."""
    cause = _CAUSES.get(message.reason, Cause.CLIENT_CANCEL)
    return Ending(_CANCEL_REASONS.get(cause, FinishReason.CANCELLED), cause)


def loss_cause(message: pb.PrefillLost) -> Cause:
    """The cause that a failed hand-over is told with."""
    return _CAUSES.get(message.cause, Cause.PREFILL_FAILED)


def total_tokens(message: pb.Open) -> int:
    """Prompt and output together, in tokens."""
    return len(message.prompt_token_ids) + int(message.max_output_tokens)


def adopted_key(message: pb.Adopt) -> AttemptKey:
    """Whose seat is to be taken over. Raises StatusError."""
    checks = _Checks("adopt")
    _check_key(message, checks)
    checks.require(message.next_sequence_no >= 1, "next_sequence_no", "must be at least 1")
    checks.end("BAD_ADOPT")
    return AttemptKey(message.key.request_id, message.key.attempt)


def check_wanted(message: pb.Adopt, next_sequence_no: int) -> None:
    """What is wanted can not be later than what comes next. Raises StatusError."""
    checks, wanted = _Checks("adopt"), message.next_sequence_no
    checks.require(wanted <= next_sequence_no, "next_sequence_no", f"must be at most {next_sequence_no}, got {wanted}")
    checks.end("BAD_ADOPT")


def _check_key(message: pb.Open | pb.Adopt, checks: _Checks) -> None:
    size = len(message.key.request_id.encode())
    checks.require(0 < size <= REQUEST_ID_BYTES_MAX, "key.request_id", f"must be 1 to {REQUEST_ID_BYTES_MAX} bytes, got {size}")
    checks.require(message.key.attempt >= 1, "key.attempt", "must be at least 1")


def check_shape(message: pb.Open) -> None:
    """What every Open has, whatever member it means. Raises StatusError."""
    checks = _Checks()
    _check_key(message, checks)
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
    limits = _limits(message, checks)
    since_last_token_s = _seconds(message, "since_last_token_s", checks)
    log_probs = message.log_probabilities.top if message.HasField("log_probabilities") else None
    checks.require((log_probs or 0) <= me.vocabulary_size, "log_probabilities.top", f"must be at most {me.vocabulary_size}")
    scored = message.log_probabilities.prompt and message.first_sequence_no <= FIRST_SEQUENCE_NO
    here = not scored or (not message.HasField("prefill") and me.computes_prompts)
    checks.require(here, "log_probabilities.prompt", "needs a member that computes prompts, and no prefill")
    earlier = _earlier(message, message, highest, checks)
    choices = _choices(message, highest, checks)
    _check_hold_and_salt(message, checks)
    prefill = _prefill(message, checks)
    grammar = _grammar(message, checks)
    fit = not message.moved or (prefill is not None and bool(earlier.token_ids))
    checks.require(fit, "moved", "goes with prefill, who writes the pages, and with output_token_ids, whose last one is fed next")
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
        earlier=earlier,
        log_probs=log_probs,
        scores_prompt=scored,
        adapter=message.adapter.name,
    )
    others = _outputs(spec, choices)
    return Request(
        choices=others,
        spec=others[0] if others else spec,
        limits=limits,
        priority=message.priority,
        sends_output=message.output_mode != v1.OUTPUT_MODE_FINAL_ONLY,
        prefill=prefill,
        first_sequence_no=message.first_sequence_no,
        traceparent=message.traceparent,
        since_last_token_s=since_last_token_s,
        moved=message.moved,
        slow_reader=SLOW_READERS.get(message.slow_reader, SlowReader.PAUSE),
        hold_s=message.hold_s,
        grammar=grammar,
        salt=adapted_salt(bytes(message.tenant_salt), adapter_of(message)),
        most_computed_tokens=message.most_computed_tokens if message.HasField("most_computed_tokens") else None,
    )


def _limits(message: pb.Open, checks: _Checks) -> Limits:
    return Limits(
        first_token_s=_seconds(message, "first_token_remaining_s", checks),
        inter_token_s=_seconds(message, "inter_token_s", checks),
        overall_s=_seconds(message, "overall_remaining_s", checks),
    )


def _outputs(spec: SequenceSpec, choices: Iterable[tuple[int, Earlier]]) -> tuple[SequenceSpec, ...]:
    """One spec for each output; whoever gets the prompt's KV scores the prompt, the others begin behind it."""
    return tuple(
        replace(spec, index=index, earlier=before, scores_prompt=spec.scores_prompt and place == 0)
        for place, (index, before) in enumerate(choices)
    )


def _check_hold_and_salt(message: pb.Open, checks: _Checks) -> None:
    hold_s, salt_bytes = message.hold_s, len(message.tenant_salt)
    checks.require(
        math.isfinite(hold_s) and 0 <= hold_s <= CLOCK_S_MAX, "hold_s", f"must be 0 to {CLOCK_S_MAX:g} s, got {hold_s}"
    )
    checks.require(salt_bytes in (0, SALT_BYTES), "tenant_salt", f"must be {SALT_BYTES} bytes or empty, got {salt_bytes}")


def can_not_go_on(wrong: CanNotGoOn) -> StatusError:
    """What is answered when the tokens of earlier attempts can not be gone on with."""
    field = _EARLIER_FIELDS[wrong.field]
    return invalid_argument([Violation(f"open.{field}", f"{field} {wrong.problem}", "OUT_OF_LIMITS")], "BAD_OPEN")


def _grammar(message: pb.Open, checks: _Checks) -> GrammarRule | None:
    if not message.HasField("grammar"):
        return None
    try:
        return rule_from(message.grammar)
    except BadGrammar as bad:
        checks.require(False, f"grammar.{message.grammar.WhichOneof('rule') or 'rule'}", str(bad), "BAD_GRAMMAR")
        return None


def _choices(message: pb.Open, highest: int, checks: _Checks) -> list[tuple[int, Earlier]]:
    """Index and earlier tokens of each output that has not ended, the one with the fewest tokens first; none for a single one."""
    choices = message.choices
    if not choices:
        checks.require(not message.told_choices, "told_choices", "goes only with choices")
        return []
    indexes = [one.index for one in choices]
    checks.require(len(choices) <= CHOICES_MAX, "choices", f"must be at most {CHOICES_MAX}, got {len(choices)}")
    checks.require(len(set(indexes)) == len(indexes), "choices", "must each have an index of their own")
    checks.require(max(indexes) < CHOICES_MAX, "choices", f"index must be 0 to {CHOICES_MAX - 1}, got {max(indexes)}")
    checks.require(not message.moved, "moved", "does not go with choices")
    checks.require(not message.output_token_ids, "output_token_ids", "must be empty with choices, which have their own")
    told = message.told_choices
    checks.require(told <= len(choices), "told_choices", f"must be at most choices, {len(choices)}, got {told}")
    ranked = not told or (message.output_mode == v1.OUTPUT_MODE_FINAL_ONLY and message.HasField("log_probabilities"))
    checks.require(ranked, "told_choices", "goes only with OUTPUT_MODE_FINAL_ONLY and log_probabilities")
    live = [
        (one.index, _earlier(one, message, highest, checks, f"choices[{place}]."))
        for place, one in enumerate(choices)
        if not one.HasField("ended")
    ]
    checks.require(bool(live), "choices", "must have at least 1 that has not ended")
    return sorted(live, key=lambda one: (len(one[1].token_ids), one[0]))


def _earlier(told: pb.Open | pb.Choice, message: pb.Open, highest: int, checks: _Checks, path: str = "") -> Earlier:
    """What earlier attempts at an output came to, as `told` says; `path` leads to it."""
    ids = tuple(told.output_token_ids)
    most, field = message.max_output_tokens, f"{path}output_token_ids"
    checks.require(len(ids) < most, field, f"must be fewer than max_output_tokens, {most}, got {len(ids)}")
    largest = max(ids, default=0)
    checks.require(largest <= highest, field, f"ids must be 0 to {highest}, got {largest}", "UNKNOWN_TOKEN")
    returned = told.returned_tokens
    checks.require(
        returned <= len(ids), f"{path}returned_tokens", f"must be at most output_token_ids, {len(ids)}, got {returned}"
    )
    needed = max(0, len(ids) - returned) if message.HasField("log_probabilities") else 0
    return Earlier(ids, told.sent_text_bytes, returned, _held(told, needed, checks, path))


def _held(message: pb.Open | pb.Choice, needed: int, checks: _Checks, path: str) -> tuple[TokenLogProb, ...]:
    """Log-probabilities of the tokens that earlier attempts chose and did not return."""
    field, told = f"{path}held_log_probabilities", message.held_log_probabilities
    checks.require(len(told) == needed, field, f"must be {needed}, one for each token that is not returned, got {len(told)}")
    try:
        return from_router(told)
    except ValueError as bad:
        checks.require(False, field, f"has an entry that can not be read: {bad}")
        return ()


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

"""A request as another router took it in, from what its seat was opened with and what its record says."""

from typing import Any

from lifecycle.adapters import Adapter
from lifecycle.deadlines import Deadlines, Limits
from lifecycle.record import RequestRecord
from router.pool_messages import OUTPUT_MODES, SLOW_READERS, UTF8_POLICIES
from router.request import Choices, Delivery, OutputMode, Sampling, ServedModel, SlowReader, Stop, Utf8Policy, ValidatedRequest
from text.grammar_rule import rule_from

_OUTPUT_MODES = {number: mode for mode, number in OUTPUT_MODES.items()}
_SLOW_READERS = {number: policy for policy, number in SLOW_READERS.items()}
_UTF8_POLICIES = {number: policy for policy, number in UTF8_POLICIES.items()}


def adopted_request(record: RequestRecord, opening: Any, model: ServedModel) -> ValidatedRequest:
    """`opening` is the Open of the seat; it went through validation at the router that sent it."""
    made = max(1, len(opening.choices))
    return ValidatedRequest(
        request_id=record.request_id,
        tenant=record.tenant,
        fingerprint=record.fingerprint,
        model=model,
        prompt_token_ids=tuple(opening.prompt_token_ids),
        sampling=_sampling(opening.sampling),
        stop=Stop(
            sequences=tuple(opening.stop.sequences),
            token_ids=tuple(opening.stop.token_ids),
            include_stop=opening.stop.include_stop,
            ignore_eos=opening.stop.ignore_eos,
            min_output_tokens=opening.stop.min_output_tokens,
        ),
        max_output_tokens=opening.max_output_tokens,
        delivery=Delivery(
            output_mode=_OUTPUT_MODES.get(opening.output_mode, OutputMode.DELTA),
            slow_reader=_SLOW_READERS.get(opening.slow_reader, SlowReader.PAUSE),
            detach_s=record.detach_s,
            log_probs=opening.log_probabilities.top if _tells_log_probs(opening) else None,
            scores_prompt=opening.log_probabilities.prompt,
            echo_prompt=opening.echo_prompt,
        ),
        utf8_policy=_UTF8_POLICIES.get(opening.utf8_policy, Utf8Policy.UNSET),
        priority=record.priority,
        limits=Limits(inter_token_s=opening.inter_token_s if opening.HasField("inter_token_s") else None),
        grammar=rule_from(opening.grammar) if opening.HasField("grammar") else None,
        choices=Choices(opening.told_choices or made, made),
        adapter=Adapter(opening.adapter.name, opening.adapter.identity) if opening.HasField("adapter") else None,
    )


def _tells_log_probs(opening: Any) -> bool:
    return bool(opening.HasField("log_probabilities") and not opening.ranks_only)


def adopted_deadlines(record: RequestRecord, opening: Any, now: float, wall: float) -> Deadlines:
    """The request's clocks in this process: its age is told by the record, what is left of each clock by the decode member."""
    age_s = max(0.0, wall - record.created_at)

    def limit_s(name: str) -> float | None:
        return age_s + getattr(opening, name) if opening.HasField(name) else None

    limits = Limits(
        first_token_s=limit_s("first_token_remaining_s"),
        inter_token_s=opening.inter_token_s if opening.HasField("inter_token_s") else None,
        overall_s=limit_s("overall_remaining_s"),
    )
    return Deadlines(limits, now - age_s)


def _sampling(values: Any) -> Sampling:
    return Sampling(
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        repetition_penalty=values.repetition_penalty,
        presence_penalty=values.presence_penalty,
        frequency_penalty=values.frequency_penalty,
        logit_bias=tuple(sorted(values.logit_bias.items())),
        seed=values.seed,
    )

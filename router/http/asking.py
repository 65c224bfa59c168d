"""What both kinds of bodies ask for, as GenerateRequests. Pure.

The router checks ranges; here only what a GenerateRequest cannot say is looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.http.errors import HttpError
from router.http.fields import Asked
from router.http.names import Names
from router.http.rules import BadRule, Rule, rule_of
from rpc.details import Violation
from tandem.v1 import inference_pb2 as pb

_UINT32_MAX = 2**32 - 1
_UINT32_DIGITS = 10
_UINT64_MAX = 2**64 - 1
#: Fields that are refused where they ask for something: an answer that ignored them would mean something else.
_UNSUPPORTED = (
    *("tools", "functions", "audio", "modalities", "web_search_options", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "documents", "suffix", "prompt_embeds", "use_beam_search", "bad_words", "allowed_token_ids"),
    *("logits_processors", "prompt_logprobs", "truncate_prompt_tokens"),
)
#: Values of them that ask for nothing.
_HARMLESS: Mapping[str, Any] = {"modalities": ["text"]}


@dataclass(frozen=True, slots=True)
class One:
    """One request to the router, and the client's names of what is in it."""

    message: pb.GenerateRequest
    names: Names


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call. `choices`: outputs of each request. `model`: the name that the answer bears."""

    requests: Sequence[One]
    choices: int
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    log_probs: bool


@dataclass(slots=True)
class Base:
    """A request without its input, and what is wrong so far. `own`: client's names by the router's, as in Names."""

    message: pb.GenerateRequest
    own: dict[str, str]
    found: list[Violation] = field(default_factory=list)

    def add(self, path: str, description: str, reason: str) -> None:
        """One thing that is wrong, by the client's name of the field."""
        self.found.append(Violation(path, description, reason))

    def check(self) -> None:
        """Raises HttpError (400) with everything that is wrong."""
        if self.found:
            message = "; ".join(f"{one.field}: {one.description}" for one in self.found)
            raise HttpError(400, message, self.found[0].reason, self.found[0].field)


def base_of(body: Asked, served: str, request_id: str, limit: str) -> Base:
    """What both bodies have. `served`: the name of the cell's model; any other one is looked for among its adapters.

    `limit`: the client's name of max_output_tokens.
    """
    base = Base(pb.GenerateRequest(request_id=request_id), {"max_output_tokens": limit, "choices": "n"})
    message = base.message
    _unsupported(base, body)
    if body.model and body.model != served:
        message.adapter = body.model
    _set(message, priority=body.priority, max_output_tokens=getattr(body, limit), choices=body.n)
    _sampling(base, body)
    _stop(message, body)
    message.output_mode = pb.OUTPUT_MODE_DELTA if body.stream else pb.OUTPUT_MODE_FINAL_ONLY
    # A model may end inside a character; such clients have no word for that.
    message.utf8_policy = pb.UTF8_POLICY_DROP
    try:
        _under(base, rule_of(body))
    except BadRule as bad:
        base.found.append(bad.violation)
    return base


def call_of(body: Asked, requests: Sequence[One], served: str, *, log_probs: bool) -> Call:
    """The call that a body makes with these requests."""
    options = body.stream_options
    return Call(
        requests=requests,
        choices=1 if body.n is None else body.n,
        model=body.model or served,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        log_probs=log_probs,
    )


def _unsupported(base: Base, body: Asked) -> None:
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value and value != _HARMLESS.get(name):
            base.add(name, "is not supported", "UNSUPPORTED")


def _sampling(base: Base, body: Asked) -> None:
    sampling = base.message.sampling
    _set(
        sampling,
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
    )
    if body.seed is not None and not 0 <= body.seed <= _UINT64_MAX:
        base.add("seed", f"must be from 0 to {_UINT64_MAX}; got {body.seed}", "OUT_OF_RANGE")
    elif body.seed is not None:
        sampling.seed = body.seed
    for key, bias in (body.logit_bias or {}).items():
        if not key.isdecimal() or len(key) > _UINT32_DIGITS or int(key) > _UINT32_MAX:
            base.add("logit_bias", f"its names must be token ids; got {key[:32]!r}", "BAD_TOKEN_ID")
            return
        sampling.logit_bias[int(key)] = bias


def _stop(message: pb.GenerateRequest, body: Asked) -> None:
    stop = message.stop
    if body.stop is not None:
        stop.sequences.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    stop.token_ids.extend(body.stop_token_ids or ())
    _set(
        stop,
        include_stop=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        min_output_tokens=body.min_tokens,
    )


def _under(base: Base, rule: Rule | None) -> None:
    if rule is None:
        return
    base.message.grammar.CopyFrom(rule.grammar)
    for name in ("grammar", *(f"grammar.{kind}" for kind in ("json_schema", "regex", "ebnf", "json_object"))):
        base.own[name] = rule.param


def _set(message: Any, **values: Any) -> None:
    """Sets fields; None leaves one unset."""
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)

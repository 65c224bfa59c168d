"""From a client's message to a ValidatedRequest, or to every reason why it is none.

Two stages, because tokenising is costly: `examine` looks at everything that can be seen without a tokenizer, `complete`
at the lengths once the prompt is in tokens. Neither leaves anything behind.
"""

import hashlib
from collections.abc import Callable, Iterable

from lifecycle.adapters import NAME_CHARACTERS, Adapter
from lifecycle.deadlines import Limits
from router import limits as bound
from router.budget import Capacity, never_fits
from router.budget import Limits as BudgetLimits
from router.choices_check import check_log_probs, choices_of, log_probs_of
from router.findings import Findings
from router.limits import RequestLimits
from router.request import (
    ChatTurn,
    Delivery,
    Examined,
    OutputMode,
    Prompt,
    Sampling,
    ServedModel,
    SlowReader,
    Stop,
    Utf8Policy,
    ValidatedRequest,
)
from rpc.details import Resource, Violation
from rpc.status import invalid_argument, not_found
from tandem.v1 import inference_pb2 as pb
from text.errors import BadGrammar
from text.grammar_rule import GrammarRule, rule_from

_OUTPUT_MODES = {
    pb.OUTPUT_MODE_UNSPECIFIED: OutputMode.DELTA,
    pb.OUTPUT_MODE_DELTA: OutputMode.DELTA,
    pb.OUTPUT_MODE_FINAL_ONLY: OutputMode.FINAL_ONLY,
    pb.OUTPUT_MODE_CUMULATIVE: OutputMode.CUMULATIVE,
}
_UTF8_POLICIES = {
    pb.UTF8_POLICY_UNSPECIFIED: Utf8Policy.UNSET,
    pb.UTF8_POLICY_ERROR: Utf8Policy.ERROR,
    pb.UTF8_POLICY_DROP: Utf8Policy.DROP,
}
_SLOW_READERS = {
    pb.SLOW_READER_UNSPECIFIED: SlowReader.PAUSE,
    pb.SLOW_READER_PAUSE: SlowReader.PAUSE,
    pb.SLOW_READER_COALESCE: SlowReader.COALESCE,
    pb.SLOW_READER_FAIL: SlowReader.FAIL,
}
_DETACHES = {
    pb.ON_DISCONNECT_UNSPECIFIED: False,
    pb.ON_DISCONNECT_CANCEL: False,
    pb.ON_DISCONNECT_DETACH: True,
}
_CLOCKS = ("queue", "first_token", "inter_token", "overall")


def examine(
    message: pb.GenerateRequest,
    tenant: str,
    model: ServedModel,
    server: RequestLimits,
    draw_seed: Callable[[], int],
    adapter: Callable[[str], Adapter],
) -> Examined:
    """Checks everything but lengths in tokens. Raises StatusError: INVALID_ARGUMENT with all violations, or NOT_FOUND.

    `draw_seed` gives the seed of a request that names none, an unsigned 64-bit number; `adapter` what a name means, or raises
    StatusError.
    """
    findings = Findings()
    _check_id(findings, message.request_id)
    findings.name("model", message.model, bound.MODEL_NAME_BYTES)
    findings.name("adapter", message.adapter, NAME_CHARACTERS)
    prompt = _prompt(findings, message, model)
    sampling = _sampling(findings, message.sampling, model, draw_seed)
    stop = _stop(findings, message.stop, model)
    limits = _limits(findings, message.deadlines, server)
    most = message.max_output_tokens if message.HasField("max_output_tokens") else None
    if most == 0:
        findings.add("max_output_tokens", f"must be from 1 to {model.context_tokens}; got 0", "OUT_OF_RANGE")
    if most and stop.min_output_tokens > most:
        findings.add(
            "stop.min_output_tokens",
            f"must be at most max_output_tokens, {most}; got {stop.min_output_tokens}",
            "OUT_OF_RANGE",
        )
    findings.number("priority", message.priority, -bound.PRIORITY, bound.PRIORITY)
    delivery = _delivery(findings, message, server)
    choices = choices_of(findings, message, delivery.output_mode, server)
    grammar = _grammar(findings, message)
    if message.utf8_policy not in _UTF8_POLICIES:
        findings.add("utf8_policy", f"is no Utf8Policy; got {message.utf8_policy}", "UNKNOWN_VALUE")
    if findings.found:
        raise invalid_argument(findings.found)
    _check_model(message.model, model)
    return Examined(
        request_id=message.request_id,
        tenant=tenant,
        fingerprint=fingerprint(message, tenant),
        model=model,
        prompt=prompt,
        sampling=sampling,
        stop=stop,
        max_output_tokens=most,
        delivery=delivery,
        utf8_policy=_UTF8_POLICIES[message.utf8_policy],
        priority=message.priority,
        limits=limits,
        grammar=grammar,
        choices=choices,
        adapter=adapter(message.adapter) if message.adapter else None,
    )


def _check_model(name: str, model: ServedModel) -> None:
    if name not in ("", model.name):
        raise not_found(
            Resource("model", name, f"this cell serves {model.name}"),
            "UNKNOWN_MODEL",
            f"no model is called {name!r}; this cell serves {model.name!r}",
        )


def complete(
    examined: Examined, token_ids: tuple[int, ...], capacity: Capacity, server: RequestLimits, budgets: BudgetLimits
) -> ValidatedRequest:
    """The request with its prompt in tokens. Raises StatusError (INVALID_ARGUMENT) when no idle cell could run it, with the
    true limit. `capacity` is what the cell's members hold of one request."""
    path = examined.prompt.field
    if not token_ids:
        raise invalid_argument([Violation(path, "the prompt has no tokens; at least 1 is needed", "EMPTY_PROMPT")])
    least = max(1, examined.stop.min_output_tokens)
    most = examined.max_output_tokens
    if most is None:
        wanted = max(server.default_max_output_tokens, least)
        most = max(least, min(wanted, longest_output(len(token_ids), capacity, examined.choices.made)))
    _check_length(path, len(token_ids), most, capacity, budgets, examined.choices.made)
    check_log_probs(examined.delivery, path, len(token_ids), most, server)
    return ValidatedRequest(
        request_id=examined.request_id,
        tenant=examined.tenant,
        fingerprint=examined.fingerprint,
        model=examined.model,
        prompt_token_ids=token_ids,
        sampling=examined.sampling,
        stop=examined.stop,
        max_output_tokens=most,
        delivery=examined.delivery,
        utf8_policy=examined.utf8_policy,
        priority=examined.priority,
        limits=examined.limits,
        grammar=examined.grammar,
        choices=examined.choices,
        adapter=examined.adapter,
    )


def longest_output(prompt_tokens: int, capacity: Capacity, outputs: int = 1) -> int:
    """Tokens of each output that an idle cell has room for after this prompt; 0 or less when the prompt itself is too long."""
    return capacity.most_tokens_of(prompt_tokens, outputs) - prompt_tokens


def fingerprint(message: pb.GenerateRequest, tenant: str) -> str:
    """Hash over the tenant and the body as the client sent it, without the id. 64 hex digits."""
    body = pb.GenerateRequest()
    body.CopyFrom(message)
    body.ClearField("request_id")
    digest = hashlib.sha256(f"{len(tenant.encode())}:{tenant}".encode())
    digest.update(body.SerializeToString(deterministic=True))
    return digest.hexdigest()


def check_request_id(request_id: str) -> None:
    """Raises StatusError (INVALID_ARGUMENT) when this is no request id."""
    findings = Findings()
    _check_id(findings, request_id)
    if findings.found:
        raise invalid_argument(findings.found)


def check_tenant(tenant: str) -> None:
    """Raises StatusError (INVALID_ARGUMENT) when this is no tenant's name."""
    findings = Findings()
    if not tenant:
        findings.add("tandem-tenant", f"must have 1 to {bound.TENANT_BYTES} bytes; got none", "EMPTY")
    findings.name("tandem-tenant", tenant, bound.TENANT_BYTES)
    if findings.found:
        raise invalid_argument(findings.found)


def check_cancel(request_id: str, reason: str) -> None:
    """Raises StatusError (INVALID_ARGUMENT) when a cancel's fields are out of range."""
    findings = Findings()
    _check_id(findings, request_id)
    size = len(reason.encode())
    if size > bound.CANCEL_REASON_BYTES:
        findings.add("reason", f"must be at most {bound.CANCEL_REASON_BYTES} bytes; got {size}", "TOO_LONG")
    elif any(not letter.isprintable() for letter in reason):
        findings.add("reason", "must be printable, without control characters", "BAD_CHARACTER")
    if findings.found:
        raise invalid_argument(findings.found)


def _check_length(path: str, prompt_tokens: int, most: int, capacity: Capacity, budgets: BudgetLimits, outputs: int) -> None:
    """Blames the prompt when not even one token would fit after it, else the number of output tokens."""
    misfit = never_fits(prompt_tokens, most, capacity, budgets, outputs)
    if misfit is None:
        return
    alone = never_fits(prompt_tokens, 1, capacity, budgets, outputs)
    blamed, field = (misfit, "max_output_tokens") if alone is None else (alone, path)
    limit = longest_output(prompt_tokens, capacity, outputs) if alone is None else blamed.limit
    together = longest_output(0, capacity)
    description = (
        f"{misfit.sentence}; together they may have at most {together} tokens, so {field} may have at most {max(0, limit)}"
    )
    raise invalid_argument(
        [Violation(field, description, "PROMPT_TOO_LONG")],
        reason="PROMPT_TOO_LONG",
        promptTokens=str(prompt_tokens),
        maxOutputTokens=str(most),
        maxContextTokens=str(capacity.context_tokens),
    )


def _check_id(findings: Findings, request_id: str) -> None:
    if not request_id:
        findings.add("request_id", f"must have 1 to {bound.REQUEST_ID_BYTES} bytes; got none", "EMPTY")
    else:
        findings.name("request_id", request_id, bound.REQUEST_ID_BYTES)


def _prompt(findings: Findings, message: pb.GenerateRequest, model: ServedModel) -> Prompt:
    kind = message.WhichOneof("input")
    if kind == "text":
        _check_text_size(findings, "text", [message.text])
        if not message.text:
            findings.add("text", "must not be empty", "EMPTY_PROMPT")
        return Prompt("text", text=message.text)
    if kind == "tokens":
        ids = tuple(message.tokens.ids)
        if not ids:
            findings.add("tokens.ids", "must have at least 1 token id", "EMPTY_PROMPT")
        _check_token_ids(findings, "tokens.ids", ids, model)
        return Prompt("tokens.ids", token_ids=ids)
    if kind == "chat":
        return _chat(findings, message.chat)
    findings.add("input", "one of text, tokens and chat must be set", "EMPTY_PROMPT")
    return Prompt("input")


def _chat(findings: Findings, chat: pb.ChatPrompt) -> Prompt:
    path = "chat.messages"
    turns = tuple(ChatTurn(one.role, one.content) for one in chat.messages[: bound.CHAT_MESSAGES])
    if not turns:
        findings.add(path, "must have at least 1 message", "EMPTY_PROMPT")
    if len(chat.messages) > bound.CHAT_MESSAGES:
        findings.add(path, f"must have at most {bound.CHAT_MESSAGES} messages; got {len(chat.messages)}", "TOO_MANY")
    for index, turn in enumerate(turns):
        if turn.role not in bound.ROLES:
            findings.add(f"{path}[{index}].role", f"must be one of {', '.join(bound.ROLES)}", "UNKNOWN_ROLE")
    _check_text_size(findings, path, [turn.content for turn in turns])
    return Prompt(path, chat=turns)


def _check_text_size(findings: Findings, path: str, texts: Iterable[str]) -> None:
    size = sum(len(text.encode()) for text in texts)
    if size > bound.TEXT_BYTES:
        findings.add(path, f"must be at most {bound.TEXT_BYTES} bytes of text; got {size}", "TOO_LONG")


def _check_token_ids(findings: Findings, path: str, ids: tuple[int, ...], model: ServedModel) -> None:
    """Names the first id that is none; there may be millions."""
    if ids and max(ids) >= model.vocabulary_size:
        index, value = next((i, v) for i, v in enumerate(ids) if v >= model.vocabulary_size)
        findings.add(
            f"{path}[{index}]",
            f"must be at most {model.vocabulary_size - 1}, the vocabulary's last id; got {value}",
            "UNKNOWN_TOKEN_ID",
        )


def _sampling(findings: Findings, sampling: pb.SamplingParams, model: ServedModel, draw_seed: Callable[[], int]) -> Sampling:
    def unset(name: str, default: float) -> float:
        return float(getattr(sampling, name)) if sampling.HasField(name) else default

    values = Sampling(
        temperature=unset("temperature", 1.0),
        top_k=sampling.top_k,
        top_p=unset("top_p", 1.0),
        min_p=sampling.min_p,
        repetition_penalty=unset("repetition_penalty", 1.0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
    )
    findings.number("sampling.temperature", values.temperature, 0, bound.TEMPERATURE)
    findings.number("sampling.top_p", values.top_p, 0, 1, over_low=True)
    findings.number("sampling.min_p", values.min_p, 0, 1)
    findings.number("sampling.repetition_penalty", values.repetition_penalty, 0, bound.REPETITION_PENALTY, over_low=True)
    findings.number("sampling.presence_penalty", values.presence_penalty, -bound.PENALTY, bound.PENALTY)
    findings.number("sampling.frequency_penalty", values.frequency_penalty, -bound.PENALTY, bound.PENALTY)
    if len(values.logit_bias) > bound.LOGIT_BIAS_ENTRIES:
        description = f"must have at most {bound.LOGIT_BIAS_ENTRIES} entries; got {len(values.logit_bias)}"
        findings.add("sampling.logit_bias", description, "TOO_MANY")
        return values
    for token_id, bias in values.logit_bias:
        path = f"sampling.logit_bias[{token_id}]"
        findings.number(path, bias, -bound.LOGIT_BIAS, bound.LOGIT_BIAS)
        if token_id >= model.vocabulary_size:
            findings.add(path, f"its id must be at most {model.vocabulary_size - 1}", "UNKNOWN_TOKEN_ID")
    return values


def _stop(findings: Findings, stop: pb.StopParams, model: ServedModel) -> Stop:
    if len(stop.sequences) > bound.STOP_SEQUENCES:
        description = f"must have at most {bound.STOP_SEQUENCES} texts; got {len(stop.sequences)}"
        findings.add("stop.sequences", description, "TOO_MANY")
    for index, text in enumerate(stop.sequences[: bound.STOP_SEQUENCES]):
        size = len(text.encode())
        if not 1 <= size <= bound.STOP_SEQUENCE_BYTES:
            findings.add(
                f"stop.sequences[{index}]",
                f"must have 1 to {bound.STOP_SEQUENCE_BYTES} bytes; got {size}",
                "TOO_LONG" if size else "EMPTY",
            )
    if len(stop.token_ids) > bound.STOP_TOKEN_IDS:
        description = f"must have at most {bound.STOP_TOKEN_IDS} ids; got {len(stop.token_ids)}"
        findings.add("stop.token_ids", description, "TOO_MANY")
    token_ids = tuple(stop.token_ids[: bound.STOP_TOKEN_IDS])
    _check_token_ids(findings, "stop.token_ids", token_ids, model)
    return Stop(
        sequences=tuple(stop.sequences),
        token_ids=token_ids,
        include_stop=stop.include_stop,
        ignore_eos=stop.ignore_eos,
        min_output_tokens=stop.min_output_tokens,
    )


def _grammar(findings: Findings, message: pb.GenerateRequest) -> GrammarRule | None:
    """What can be seen without compiling it; the rest is a decode member's to say."""
    if not message.HasField("grammar"):
        return None
    try:
        return rule_from(message.grammar)
    except BadGrammar as bad:
        findings.add(f"grammar.{message.grammar.WhichOneof('rule') or 'rule'}", str(bad), "BAD_GRAMMAR")
        return None


def _delivery(findings: Findings, message: pb.GenerateRequest, server: RequestLimits) -> Delivery:
    if message.output_mode not in _OUTPUT_MODES:
        findings.add("output_mode", f"is no OutputMode; got {message.output_mode}", "UNKNOWN_VALUE")
    if message.slow_reader not in _SLOW_READERS:
        findings.add("slow_reader", f"is no SlowReader; got {message.slow_reader}", "UNKNOWN_VALUE")
    if message.on_disconnect not in _DETACHES:
        findings.add("on_disconnect", f"is no OnDisconnect; got {message.on_disconnect}", "UNKNOWN_VALUE")
    detaches = _DETACHES.get(message.on_disconnect, False)
    detach_s = server.default_detach_s if detaches else None
    if message.HasField("detach_timeout"):
        if detaches:
            detach_s = findings.duration_s("detach_timeout", message.detach_timeout, server.max_detach_s)
        else:
            findings.add("detach_timeout", "goes only with on_disconnect ON_DISCONNECT_DETACH", "UNEXPECTED")
    return Delivery(
        output_mode=_OUTPUT_MODES.get(message.output_mode, OutputMode.DELTA),
        slow_reader=_SLOW_READERS.get(message.slow_reader, SlowReader.PAUSE),
        detach_s=detach_s,
        log_probs=log_probs_of(findings, message, server),
        scores_prompt=message.log_probabilities.prompt,
        echo_prompt=message.echo_prompt,
    )


def _limits(findings: Findings, deadlines: pb.Deadlines, server: RequestLimits) -> Limits:
    """The request's clocks, with the server's defaults where it names none."""
    values: dict[str, float | None] = {}
    for clock in _CLOCKS:
        most: float | None = getattr(server.clock_maxima, f"{clock}_s")
        value: float | None = getattr(server.clock_defaults, f"{clock}_s")
        if deadlines.HasField(clock):
            value = findings.duration_s(f"deadlines.{clock}", getattr(deadlines, clock), most)
        values[f"{clock}_s"] = value
    return Limits(**values)

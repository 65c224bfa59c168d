import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutputMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_MODE_UNSPECIFIED: _ClassVar[OutputMode]
    OUTPUT_MODE_DELTA: _ClassVar[OutputMode]
    OUTPUT_MODE_FINAL_ONLY: _ClassVar[OutputMode]
    OUTPUT_MODE_CUMULATIVE: _ClassVar[OutputMode]

class Utf8Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UTF8_POLICY_UNSPECIFIED: _ClassVar[Utf8Policy]
    UTF8_POLICY_ERROR: _ClassVar[Utf8Policy]
    UTF8_POLICY_DROP: _ClassVar[Utf8Policy]

class OnDisconnect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_DISCONNECT_UNSPECIFIED: _ClassVar[OnDisconnect]
    ON_DISCONNECT_CANCEL: _ClassVar[OnDisconnect]
    ON_DISCONNECT_DETACH: _ClassVar[OnDisconnect]

class SlowReader(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOW_READER_UNSPECIFIED: _ClassVar[SlowReader]
    SLOW_READER_PAUSE: _ClassVar[SlowReader]
    SLOW_READER_COALESCE: _ClassVar[SlowReader]
    SLOW_READER_FAIL: _ClassVar[SlowReader]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR_COMPLETE: _ClassVar[FinishReason]
    FINISH_REASON_MAX_OUTPUT_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE_EXCEEDED: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_INTERRUPTED: _ClassVar[FinishReason]
    FINISH_REASON_MODEL_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_TRANSPORT_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_SLOW_CONSUMER: _ClassVar[FinishReason]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_CREATED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_ADMITTED: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]
    REQUEST_STATE_DRAINING: _ClassVar[RequestState]
    REQUEST_STATE_CANCEL_REQUESTED: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]

class CancelOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_OUTCOME_UNSPECIFIED: _ClassVar[CancelOutcome]
    CANCEL_OUTCOME_ACCEPTED: _ClassVar[CancelOutcome]
    CANCEL_OUTCOME_ALREADY_ENDED: _ClassVar[CancelOutcome]
OUTPUT_MODE_UNSPECIFIED: OutputMode
OUTPUT_MODE_DELTA: OutputMode
OUTPUT_MODE_FINAL_ONLY: OutputMode
OUTPUT_MODE_CUMULATIVE: OutputMode
UTF8_POLICY_UNSPECIFIED: Utf8Policy
UTF8_POLICY_ERROR: Utf8Policy
UTF8_POLICY_DROP: Utf8Policy
ON_DISCONNECT_UNSPECIFIED: OnDisconnect
ON_DISCONNECT_CANCEL: OnDisconnect
ON_DISCONNECT_DETACH: OnDisconnect
SLOW_READER_UNSPECIFIED: SlowReader
SLOW_READER_PAUSE: SlowReader
SLOW_READER_COALESCE: SlowReader
SLOW_READER_FAIL: SlowReader
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_GRAMMAR_COMPLETE: FinishReason
FINISH_REASON_MAX_OUTPUT_TOKENS: FinishReason
FINISH_REASON_CONTEXT_LIMIT: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE_EXCEEDED: FinishReason
FINISH_REASON_CONTENT_INTERRUPTED: FinishReason
FINISH_REASON_MODEL_ERROR: FinishReason
FINISH_REASON_TRANSPORT_ERROR: FinishReason
FINISH_REASON_SLOW_CONSUMER: FinishReason
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_CREATED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_ADMITTED: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_DECODING: RequestState
REQUEST_STATE_DRAINING: RequestState
REQUEST_STATE_CANCEL_REQUESTED: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_CANCELLED: RequestState
REQUEST_STATE_FAILED: RequestState
CANCEL_OUTCOME_UNSPECIFIED: CancelOutcome
CANCEL_OUTCOME_ACCEPTED: CancelOutcome
CANCEL_OUTCOME_ALREADY_ENDED: CancelOutcome

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "tokens", "chat", "sampling", "stop", "max_output_tokens", "output_mode", "deadlines", "priority", "utf8_policy", "on_disconnect", "detach_timeout", "slow_reader", "log_probabilities", "echo_prompt", "grammar", "choices", "best_of", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    UTF8_POLICY_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    DETACH_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SLOW_READER_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ECHO_PROMPT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    tokens: TokenPrompt
    chat: ChatPrompt
    sampling: SamplingParams
    stop: StopParams
    max_output_tokens: int
    output_mode: OutputMode
    deadlines: Deadlines
    priority: int
    utf8_policy: Utf8Policy
    on_disconnect: OnDisconnect
    detach_timeout: _duration_pb2.Duration
    slow_reader: SlowReader
    log_probabilities: LogProbabilityParams
    echo_prompt: bool
    grammar: Grammar
    choices: int
    best_of: int
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopParams, _Mapping]] = ..., max_output_tokens: _Optional[int] = ..., output_mode: _Optional[_Union[OutputMode, str]] = ..., deadlines: _Optional[_Union[Deadlines, _Mapping]] = ..., priority: _Optional[int] = ..., utf8_policy: _Optional[_Union[Utf8Policy, str]] = ..., on_disconnect: _Optional[_Union[OnDisconnect, str]] = ..., detach_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., slow_reader: _Optional[_Union[SlowReader, str]] = ..., log_probabilities: _Optional[_Union[LogProbabilityParams, _Mapping]] = ..., echo_prompt: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., choices: _Optional[int] = ..., best_of: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class LogProbabilityParams(_message.Message):
    __slots__ = ("top", "prompt")
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    top: int
    prompt: bool
    def __init__(self, top: _Optional[int] = ..., prompt: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "json_object")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    json_object: JsonObject
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., json_object: _Optional[_Union[JsonObject, _Mapping]] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("sequences", "token_ids", "include_stop", "ignore_eos", "min_output_tokens")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    min_output_tokens: int
    def __init__(self, sequences: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., include_stop: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., min_output_tokens: _Optional[int] = ...) -> None: ...

class Deadlines(_message.Message):
    __slots__ = ("queue", "first_token", "inter_token", "overall")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OVERALL_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    inter_token: _duration_pb2.Duration
    overall: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., inter_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., overall: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("sequence_no", "started", "delta", "completed", "prompt", "choice_ended")
    SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_ENDED_FIELD_NUMBER: _ClassVar[int]
    sequence_no: int
    started: Started
    delta: Delta
    completed: Completed
    prompt: Prompt
    choice_ended: ChoiceEnded
    def __init__(self, sequence_no: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., choice_ended: _Optional[_Union[ChoiceEnded, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "model_snapshot", "seed", "prompt_tokens", "max_output_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    model_snapshot: str
    seed: int
    prompt_tokens: int
    max_output_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_snapshot: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "log_probabilities")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedCompositeFieldContainer[TokenLogProbability]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[_Union[TokenLogProbability, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "log_probabilities", "cumulative", "index")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedCompositeFieldContainer[TokenLogProbability]
    cumulative: bool
    index: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[_Union[TokenLogProbability, _Mapping]]] = ..., cumulative: _Optional[bool] = ..., index: _Optional[int] = ...) -> None: ...

class ChoiceEnded(_message.Message):
    __slots__ = ("index", "finish_reason", "matched_stop", "matched_token_id", "text", "token_ids", "log_probabilities", "cause")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: FinishReason
    matched_stop: str
    matched_token_id: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedCompositeFieldContainer[TokenLogProbability]
    cause: str
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[_Union[TokenLogProbability, _Mapping]]] = ..., cause: _Optional[str] = ...) -> None: ...

class TokenLogProbability(_message.Message):
    __slots__ = ("log_probability", "token", "top_token_ids", "top_log_probabilities", "top_tokens")
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    log_probability: float
    token: bytes
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, log_probability: _Optional[float] = ..., token: _Optional[bytes] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probabilities: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("finish_reason", "state", "matched_stop", "matched_token_id", "usage", "timings", "text", "cause", "token_ids", "log_probabilities")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    state: RequestState
    matched_stop: str
    matched_token_id: int
    usage: Usage
    timings: Timings
    text: str
    cause: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedCompositeFieldContainer[TokenLogProbability]
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., state: _Optional[_Union[RequestState, str]] = ..., matched_stop: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., text: _Optional[str] = ..., cause: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[_Union[TokenLogProbability, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "selected_tokens", "processed_tokens", "returned_tokens", "billed_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    selected_tokens: int
    processed_tokens: int
    returned_tokens: int
    billed_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., selected_tokens: _Optional[int] = ..., processed_tokens: _Optional[int] = ..., returned_tokens: _Optional[int] = ..., billed_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("check_s", "queue_s", "prefill_queue_s", "prefill_s", "handover_s", "handover_exposed_s", "decode_s", "stop_hold_s", "send_s", "first_token_s", "total_s", "cancel_observed_s", "cancel_effective_s")
    CHECK_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STOP_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    SEND_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    CANCEL_OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    CANCEL_EFFECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    check_s: float
    queue_s: float
    prefill_queue_s: float
    prefill_s: float
    handover_s: float
    handover_exposed_s: float
    decode_s: float
    stop_hold_s: float
    send_s: float
    first_token_s: float
    total_s: float
    cancel_observed_s: float
    cancel_effective_s: float
    def __init__(self, check_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., handover_s: _Optional[float] = ..., handover_exposed_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., stop_hold_s: _Optional[float] = ..., send_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., cancel_observed_s: _Optional[float] = ..., cancel_effective_s: _Optional[float] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "next_sequence_no")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    next_sequence_no: int
    def __init__(self, request_id: _Optional[str] = ..., next_sequence_no: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "reason", "wait", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    wait: bool
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., wait: _Optional[bool] = ..., choice: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("outcome", "state", "finish_reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: CancelOutcome
    state: RequestState
    finish_reason: FinishReason
    def __init__(self, outcome: _Optional[_Union[CancelOutcome, str]] = ..., state: _Optional[_Union[RequestState, str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: RequestRecord
    def __init__(self, record: _Optional[_Union[RequestRecord, _Mapping]] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "model_snapshot", "state", "attempt", "priority", "router", "prefill_member", "decode_member", "transitions", "finish_reason", "cause", "usage", "timings", "sent_bytes", "held_bytes", "cancel_requested_at", "cancel_observed_at", "cancel_effective_at", "cancel_reason", "released", "traceparent", "terminal_sequence_no", "adapter")
    class ReleasedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUESTED_AT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_EFFECTIVE_AT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REASON_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    model_snapshot: str
    state: RequestState
    attempt: int
    priority: int
    router: str
    prefill_member: str
    decode_member: str
    transitions: _containers.RepeatedCompositeFieldContainer[Transition]
    finish_reason: FinishReason
    cause: str
    usage: Usage
    timings: Timings
    sent_bytes: int
    held_bytes: int
    cancel_requested_at: _timestamp_pb2.Timestamp
    cancel_observed_at: _timestamp_pb2.Timestamp
    cancel_effective_at: _timestamp_pb2.Timestamp
    cancel_reason: str
    released: _containers.ScalarMap[str, int]
    traceparent: str
    terminal_sequence_no: int
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., model_snapshot: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., attempt: _Optional[int] = ..., priority: _Optional[int] = ..., router: _Optional[str] = ..., prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ..., transitions: _Optional[_Iterable[_Union[Transition, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., cause: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., sent_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., cancel_requested_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cancel_observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cancel_effective_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cancel_reason: _Optional[str] = ..., released: _Optional[_Mapping[str, int]] = ..., traceparent: _Optional[str] = ..., terminal_sequence_no: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class Transition(_message.Message):
    __slots__ = ("state", "at", "event", "attempt", "detail")
    STATE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    at: _timestamp_pb2.Timestamp
    event: str
    attempt: int
    detail: str
    def __init__(self, state: _Optional[_Union[RequestState, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., event: _Optional[str] = ..., attempt: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "snapshot", "context_tokens", "vocabulary_size", "prefill_members", "decode_members", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    snapshot: str
    context_tokens: int
    vocabulary_size: int
    prefill_members: int
    decode_members: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., snapshot: _Optional[str] = ..., context_tokens: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., prefill_members: _Optional[int] = ..., decode_members: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

from tandem.pools.v1 import grant_pb2 as _grant_pb2
from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckGrammarRequest(_message.Message):
    __slots__ = ("model_snapshot", "grammar")
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    model_snapshot: str
    grammar: _inference_pb2.Grammar
    def __init__(self, model_snapshot: _Optional[str] = ..., grammar: _Optional[_Union[_inference_pb2.Grammar, _Mapping]] = ...) -> None: ...

class CheckGrammarResponse(_message.Message):
    __slots__ = ("problem", "costly")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    COSTLY_FIELD_NUMBER: _ClassVar[int]
    problem: str
    costly: bool
    def __init__(self, problem: _Optional[str] = ..., costly: _Optional[bool] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("open", "cancel", "prefill_lost", "adopt", "pause", "push", "keep_end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOST_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    KEEP_END_FIELD_NUMBER: _ClassVar[int]
    open: Open
    cancel: CancelSeat
    prefill_lost: PrefillLost
    adopt: Adopt
    pause: PauseSeat
    push: PushSeat
    keep_end: KeepEnd
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., cancel: _Optional[_Union[CancelSeat, _Mapping]] = ..., prefill_lost: _Optional[_Union[PrefillLost, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., pause: _Optional[_Union[PauseSeat, _Mapping]] = ..., push: _Optional[_Union[PushSeat, _Mapping]] = ..., keep_end: _Optional[_Union[KeepEnd, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("key", "model_snapshot", "incarnation", "prompt_token_ids", "sampling", "stop", "max_output_tokens", "output_mode", "utf8_policy", "priority", "first_sequence_no", "first_token_remaining_s", "inter_token_s", "overall_remaining_s", "prefill", "traceparent", "output_token_ids", "sent_text_bytes", "returned_tokens", "moved", "slow_reader", "hold_s", "since_last_token_s", "tenant_salt", "most_computed_tokens", "log_probabilities", "held_log_probabilities", "returned", "echo_prompt", "grammar", "choices", "told_choices", "ranks_only", "adapter")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    UTF8_POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    OVERALL_REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SENT_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    SLOW_READER_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_LAST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    MOST_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    HELD_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    ECHO_PROMPT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOLD_CHOICES_FIELD_NUMBER: _ClassVar[int]
    RANKS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    key: _grant_pb2.AttemptKey
    model_snapshot: str
    incarnation: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    stop: _inference_pb2.StopParams
    max_output_tokens: int
    output_mode: _inference_pb2.OutputMode
    utf8_policy: _inference_pb2.Utf8Policy
    priority: int
    first_sequence_no: int
    first_token_remaining_s: float
    inter_token_s: float
    overall_remaining_s: float
    prefill: _grant_pb2.Peer
    traceparent: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sent_text_bytes: int
    returned_tokens: int
    moved: bool
    slow_reader: _inference_pb2.SlowReader
    hold_s: float
    since_last_token_s: float
    tenant_salt: bytes
    most_computed_tokens: int
    log_probabilities: _inference_pb2.LogProbabilityParams
    held_log_probabilities: _containers.RepeatedScalarFieldContainer[bytes]
    returned: bytes
    echo_prompt: bool
    grammar: _inference_pb2.Grammar
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    told_choices: int
    ranks_only: bool
    adapter: _grant_pb2.Adapter
    def __init__(self, key: _Optional[_Union[_grant_pb2.AttemptKey, _Mapping]] = ..., model_snapshot: _Optional[str] = ..., incarnation: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_inference_pb2.StopParams, _Mapping]] = ..., max_output_tokens: _Optional[int] = ..., output_mode: _Optional[_Union[_inference_pb2.OutputMode, str]] = ..., utf8_policy: _Optional[_Union[_inference_pb2.Utf8Policy, str]] = ..., priority: _Optional[int] = ..., first_sequence_no: _Optional[int] = ..., first_token_remaining_s: _Optional[float] = ..., inter_token_s: _Optional[float] = ..., overall_remaining_s: _Optional[float] = ..., prefill: _Optional[_Union[_grant_pb2.Peer, _Mapping]] = ..., traceparent: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sent_text_bytes: _Optional[int] = ..., returned_tokens: _Optional[int] = ..., moved: _Optional[bool] = ..., slow_reader: _Optional[_Union[_inference_pb2.SlowReader, str]] = ..., hold_s: _Optional[float] = ..., since_last_token_s: _Optional[float] = ..., tenant_salt: _Optional[bytes] = ..., most_computed_tokens: _Optional[int] = ..., log_probabilities: _Optional[_Union[_inference_pb2.LogProbabilityParams, _Mapping]] = ..., held_log_probabilities: _Optional[_Iterable[bytes]] = ..., returned: _Optional[bytes] = ..., echo_prompt: _Optional[bool] = ..., grammar: _Optional[_Union[_inference_pb2.Grammar, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., told_choices: _Optional[int] = ..., ranks_only: _Optional[bool] = ..., adapter: _Optional[_Union[_grant_pb2.Adapter, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "output_token_ids", "sent_text_bytes", "returned_tokens", "held_log_probabilities", "returned", "ended")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SENT_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sent_text_bytes: int
    returned_tokens: int
    held_log_probabilities: _containers.RepeatedScalarFieldContainer[bytes]
    returned: bytes
    ended: ChoiceEnd
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sent_text_bytes: _Optional[int] = ..., returned_tokens: _Optional[int] = ..., held_log_probabilities: _Optional[_Iterable[bytes]] = ..., returned: _Optional[bytes] = ..., ended: _Optional[_Union[ChoiceEnd, _Mapping]] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("finish_reason", "cause", "matched_stop", "matched_token_id", "usage", "untold")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _inference_pb2.FinishReason
    cause: str
    matched_stop: str
    matched_token_id: int
    usage: _inference_pb2.Usage
    untold: bool
    def __init__(self, finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cause: _Optional[str] = ..., matched_stop: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., untold: _Optional[bool] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("key", "incarnation", "next_sequence_no")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    key: _grant_pb2.AttemptKey
    incarnation: str
    next_sequence_no: int
    def __init__(self, key: _Optional[_Union[_grant_pb2.AttemptKey, _Mapping]] = ..., incarnation: _Optional[str] = ..., next_sequence_no: _Optional[int] = ...) -> None: ...

class PauseSeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushSeat(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _grant_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_grant_pb2.Grant, _Mapping]] = ...) -> None: ...

class CancelSeat(_message.Message):
    __slots__ = ("reason", "choice")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    choice: int
    def __init__(self, reason: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class PrefillLost(_message.Message):
    __slots__ = ("cause", "drained")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    cause: str
    drained: bool
    def __init__(self, cause: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("granted", "refused", "committed", "output", "ended", "adopted", "paused", "pushed")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    granted: Granted
    refused: Refused
    committed: Committed
    output: Output
    ended: Ended
    adopted: Adopted
    paused: Paused
    pushed: Pushed
    def __init__(self, granted: _Optional[_Union[Granted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., pushed: _Optional[_Union[Pushed, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("grant", "cached_tokens")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grant: _grant_pb2.Grant
    cached_tokens: int
    def __init__(self, grant: _Optional[_Union[_grant_pb2.Grant, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("open", "next_sequence_no", "output_token_ids", "returned_tokens", "sent_text_bytes", "committed", "held_log_probabilities", "returned", "choices")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    HELD_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    open: Open
    next_sequence_no: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    returned_tokens: int
    sent_text_bytes: int
    committed: Committed
    held_log_probabilities: _containers.RepeatedScalarFieldContainer[bytes]
    returned: bytes
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., next_sequence_no: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., returned_tokens: _Optional[int] = ..., sent_text_bytes: _Optional[int] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., held_log_probabilities: _Optional[_Iterable[bytes]] = ..., returned: _Optional[bytes] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("cache_tokens", "selected_token_ids", "pushable", "held_log_probabilities")
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PUSHABLE_FIELD_NUMBER: _ClassVar[int]
    HELD_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    cache_tokens: int
    selected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pushable: bool
    held_log_probabilities: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cache_tokens: _Optional[int] = ..., selected_token_ids: _Optional[_Iterable[int]] = ..., pushable: _Optional[bool] = ..., held_log_probabilities: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Pushed(_message.Message):
    __slots__ = ("ok", "cause", "sent_bytes", "handover_s")
    OK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    cause: str
    sent_bytes: int
    handover_s: float
    def __init__(self, ok: _Optional[bool] = ..., cause: _Optional[str] = ..., sent_bytes: _Optional[int] = ..., handover_s: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "detail", "retryable")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    retryable: bool
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("handover_s", "compute_s", "queue_s")
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    handover_s: float
    compute_s: float
    queue_s: float
    def __init__(self, handover_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("response", "next_sequence_no", "selected_token_ids", "text_bytes", "returned_tokens", "held_log_probabilities", "choice", "ended")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    response: bytes
    next_sequence_no: int
    selected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_bytes: int
    returned_tokens: int
    held_log_probabilities: _containers.RepeatedScalarFieldContainer[bytes]
    choice: int
    ended: ChoiceEnd
    def __init__(self, response: _Optional[bytes] = ..., next_sequence_no: _Optional[int] = ..., selected_token_ids: _Optional[_Iterable[int]] = ..., text_bytes: _Optional[int] = ..., returned_tokens: _Optional[int] = ..., held_log_probabilities: _Optional[_Iterable[bytes]] = ..., choice: _Optional[int] = ..., ended: _Optional[_Union[ChoiceEnd, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("finish_reason", "cause", "matched_stop", "matched_token_id", "usage", "text", "next_sequence_no", "decode_s", "stop_hold_s", "held_bytes", "cancel_observed_s", "cancel_effective_s", "released", "last", "returned")
    class ReleasedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NO_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STOP_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    CANCEL_EFFECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _inference_pb2.FinishReason
    cause: str
    matched_stop: str
    matched_token_id: int
    usage: _inference_pb2.Usage
    text: str
    next_sequence_no: int
    decode_s: float
    stop_hold_s: float
    held_bytes: int
    cancel_observed_s: float
    cancel_effective_s: float
    released: _containers.ScalarMap[str, int]
    last: Output
    returned: bytes
    def __init__(self, finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cause: _Optional[str] = ..., matched_stop: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., text: _Optional[str] = ..., next_sequence_no: _Optional[int] = ..., decode_s: _Optional[float] = ..., stop_hold_s: _Optional[float] = ..., held_bytes: _Optional[int] = ..., cancel_observed_s: _Optional[float] = ..., cancel_effective_s: _Optional[float] = ..., released: _Optional[_Mapping[str, int]] = ..., last: _Optional[_Union[Output, _Mapping]] = ..., returned: _Optional[bytes] = ...) -> None: ...

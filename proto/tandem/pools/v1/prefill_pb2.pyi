from tandem.pools.v1 import grant_pb2 as _grant_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_STATE_UNSPECIFIED: _ClassVar[DrainState]
    DRAIN_STATE_DRAINED: _ClassVar[DrainState]
    DRAIN_STATE_COMMITTED: _ClassVar[DrainState]
    DRAIN_STATE_WRONG_INCARNATION: _ClassVar[DrainState]
DRAIN_STATE_UNSPECIFIED: DrainState
DRAIN_STATE_DRAINED: DrainState
DRAIN_STATE_COMMITTED: DrainState
DRAIN_STATE_WRONG_INCARNATION: DrainState

class PrefillRequest(_message.Message):
    __slots__ = ("key", "model_snapshot", "prompt_token_ids", "grant", "priority", "remaining_s", "traceparent", "incarnation", "tenant_salt", "adapter")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    key: _grant_pb2.AttemptKey
    model_snapshot: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grant: _grant_pb2.Grant
    priority: int
    remaining_s: float
    traceparent: str
    incarnation: str
    tenant_salt: bytes
    adapter: _grant_pb2.Adapter
    def __init__(self, key: _Optional[_Union[_grant_pb2.AttemptKey, _Mapping]] = ..., model_snapshot: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., grant: _Optional[_Union[_grant_pb2.Grant, _Mapping]] = ..., priority: _Optional[int] = ..., remaining_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., incarnation: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., adapter: _Optional[_Union[_grant_pb2.Adapter, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "progress", "committed", "failed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    progress: PrefillProgress
    committed: PrefillCommitted
    failed: PrefillFailed
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., committed: _Optional[_Union[PrefillCommitted, _Mapping]] = ..., failed: _Optional[_Union[PrefillFailed, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("queued_tokens",)
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    def __init__(self, queued_tokens: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("computed_tokens", "cached_tokens")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    cached_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillCommitted(_message.Message):
    __slots__ = ("cached_tokens", "sent_bytes", "queue_s", "compute_s", "handover_s", "exposed_s", "post_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    POST_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    sent_bytes: int
    queue_s: float
    compute_s: float
    handover_s: float
    exposed_s: float
    post_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., handover_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., post_s: _Optional[float] = ...) -> None: ...

class PrefillFailed(_message.Message):
    __slots__ = ("cause", "retryable", "detail")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    cause: str
    retryable: bool
    detail: str
    def __init__(self, cause: _Optional[str] = ..., retryable: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grant_id", "incarnation")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    grant_id: bytes
    incarnation: str
    def __init__(self, grant_id: _Optional[bytes] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: DrainState
    def __init__(self, state: _Optional[_Union[DrainState, str]] = ...) -> None: ...

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_READY: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_STALE: _ClassVar[MemberState]
    MEMBER_STATE_LOST: _ClassVar[MemberState]
    MEMBER_STATE_UNREACHED: _ClassVar[MemberState]
    MEMBER_STATE_UNFIT: _ClassVar[MemberState]

class RequestStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STAGE_UNSPECIFIED: _ClassVar[RequestStage]
    REQUEST_STAGE_QUEUE: _ClassVar[RequestStage]
    REQUEST_STAGE_SEAT: _ClassVar[RequestStage]
    REQUEST_STAGE_PREFILL_QUEUE: _ClassVar[RequestStage]
    REQUEST_STAGE_PREFILL: _ClassVar[RequestStage]
    REQUEST_STAGE_HANDOVER: _ClassVar[RequestStage]
    REQUEST_STAGE_DECODE: _ClassVar[RequestStage]
    REQUEST_STAGE_READER: _ClassVar[RequestStage]
    REQUEST_STAGE_SEND: _ClassVar[RequestStage]
    REQUEST_STAGE_CANCEL: _ClassVar[RequestStage]
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_READY: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_STALE: MemberState
MEMBER_STATE_LOST: MemberState
MEMBER_STATE_UNREACHED: MemberState
MEMBER_STATE_UNFIT: MemberState
REQUEST_STAGE_UNSPECIFIED: RequestStage
REQUEST_STAGE_QUEUE: RequestStage
REQUEST_STAGE_SEAT: RequestStage
REQUEST_STAGE_PREFILL_QUEUE: RequestStage
REQUEST_STAGE_PREFILL: RequestStage
REQUEST_STAGE_HANDOVER: RequestStage
REQUEST_STAGE_DECODE: RequestStage
REQUEST_STAGE_READER: RequestStage
REQUEST_STAGE_SEND: RequestStage
REQUEST_STAGE_CANCEL: RequestStage

class WatchRequest(_message.Message):
    __slots__ = ("period", "max_requests", "max_ended")
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ENDED_FIELD_NUMBER: _ClassVar[int]
    period: _duration_pb2.Duration
    max_requests: int
    max_ended: int
    def __init__(self, period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_requests: _Optional[int] = ..., max_ended: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: CellView
    def __init__(self, view: _Optional[_Union[CellView, _Mapping]] = ...) -> None: ...

class CellView(_message.Message):
    __slots__ = ("at", "router", "model", "model_snapshot", "context_tokens", "store_available", "draining", "routers", "pools", "queue", "budgets", "running_requests", "requests", "ended_requests", "ended")
    AT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    router: str
    model: str
    model_snapshot: str
    context_tokens: int
    store_available: bool
    draining: bool
    routers: _containers.RepeatedCompositeFieldContainer[RouterView]
    pools: _containers.RepeatedCompositeFieldContainer[PoolView]
    queue: QueueView
    budgets: _containers.RepeatedCompositeFieldContainer[BudgetView]
    running_requests: int
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    ended_requests: int
    ended: _containers.RepeatedCompositeFieldContainer[EndedRequest]
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., router: _Optional[str] = ..., model: _Optional[str] = ..., model_snapshot: _Optional[str] = ..., context_tokens: _Optional[int] = ..., store_available: _Optional[bool] = ..., draining: _Optional[bool] = ..., routers: _Optional[_Iterable[_Union[RouterView, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolView, _Mapping]]] = ..., queue: _Optional[_Union[QueueView, _Mapping]] = ..., budgets: _Optional[_Iterable[_Union[BudgetView, _Mapping]]] = ..., running_requests: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., ended_requests: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[EndedRequest, _Mapping]]] = ...) -> None: ...

class RouterView(_message.Message):
    __slots__ = ("name", "address", "lease_left_s", "tells")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TELLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    lease_left_s: float
    tells: bool
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., lease_left_s: _Optional[float] = ..., tells: _Optional[bool] = ...) -> None: ...

class PoolView(_message.Message):
    __slots__ = ("role", "members")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    role: str
    members: _containers.RepeatedCompositeFieldContainer[MemberView]
    def __init__(self, role: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberView, _Mapping]]] = ...) -> None: ...

class MemberView(_message.Message):
    __slots__ = ("name", "incarnation", "address", "state", "reason", "news_age_s", "running_sequences", "paused_sequences", "waiting_sequences", "preempted_sequences", "max_sequences", "waiting_tokens", "steps_per_s", "tokens_per_s", "step_s", "pages", "page_tokens", "computes_prompts", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEWS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    address: str
    state: MemberState
    reason: str
    news_age_s: float
    running_sequences: int
    paused_sequences: int
    waiting_sequences: int
    preempted_sequences: int
    max_sequences: int
    waiting_tokens: int
    steps_per_s: float
    tokens_per_s: float
    step_s: float
    pages: PageStates
    page_tokens: int
    computes_prompts: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[MemberState, str]] = ..., reason: _Optional[str] = ..., news_age_s: _Optional[float] = ..., running_sequences: _Optional[int] = ..., paused_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., preempted_sequences: _Optional[int] = ..., max_sequences: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., pages: _Optional[_Union[PageStates, _Mapping]] = ..., page_tokens: _Optional[int] = ..., computes_prompts: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class PageStates(_message.Message):
    __slots__ = ("free", "owned", "cached", "granted", "quarantined", "pinned")
    FREE_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    free: int
    owned: int
    cached: int
    granted: int
    quarantined: int
    pinned: int
    def __init__(self, free: _Optional[int] = ..., owned: _Optional[int] = ..., cached: _Optional[int] = ..., granted: _Optional[int] = ..., quarantined: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class QueueView(_message.Message):
    __slots__ = ("requests", "tokens", "max_requests", "tenants", "lanes")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    requests: int
    tokens: int
    max_requests: int
    tenants: int
    lanes: _containers.RepeatedCompositeFieldContainer[QueueLane]
    def __init__(self, requests: _Optional[int] = ..., tokens: _Optional[int] = ..., max_requests: _Optional[int] = ..., tenants: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[QueueLane, _Mapping]]] = ...) -> None: ...

class QueueLane(_message.Message):
    __slots__ = ("priority", "requests", "oldest_s")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    requests: int
    oldest_s: float
    def __init__(self, priority: _Optional[int] = ..., requests: _Optional[int] = ..., oldest_s: _Optional[float] = ...) -> None: ...

class BudgetView(_message.Message):
    __slots__ = ("resource", "scope", "name", "used", "limit")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    resource: str
    scope: str
    name: str
    used: int
    limit: int
    def __init__(self, resource: _Optional[str] = ..., scope: _Optional[str] = ..., name: _Optional[str] = ..., used: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "adapter", "state", "stage", "attempt", "priority", "age_s", "in_state_s", "prompt_tokens", "computed_prompt_tokens", "cached_prompt_tokens", "output_tokens", "max_output_tokens", "choices", "prefill_member", "decode_member", "readers", "unsent_bytes", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IN_STATE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    UNSENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    adapter: str
    state: _inference_pb2.RequestState
    stage: RequestStage
    attempt: int
    priority: int
    age_s: float
    in_state_s: float
    prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    choices: int
    prefill_member: str
    decode_member: str
    readers: int
    unsent_bytes: int
    timings: _inference_pb2.Timings
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., state: _Optional[_Union[_inference_pb2.RequestState, str]] = ..., stage: _Optional[_Union[RequestStage, str]] = ..., attempt: _Optional[int] = ..., priority: _Optional[int] = ..., age_s: _Optional[float] = ..., in_state_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., choices: _Optional[int] = ..., prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ..., readers: _Optional[int] = ..., unsent_bytes: _Optional[int] = ..., timings: _Optional[_Union[_inference_pb2.Timings, _Mapping]] = ...) -> None: ...

class EndedRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "adapter", "state", "finish_reason", "cause", "at", "attempts", "priority", "prefill_member", "decode_member", "usage", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    adapter: str
    state: _inference_pb2.RequestState
    finish_reason: _inference_pb2.FinishReason
    cause: str
    at: _timestamp_pb2.Timestamp
    attempts: int
    priority: int
    prefill_member: str
    decode_member: str
    usage: _inference_pb2.Usage
    timings: _inference_pb2.Timings
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., state: _Optional[_Union[_inference_pb2.RequestState, str]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cause: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[int] = ..., priority: _Optional[int] = ..., prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_inference_pb2.Timings, _Mapping]] = ...) -> None: ...

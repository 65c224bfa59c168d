from tandem.pools.v1 import grant_pb2 as _grant_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_ROLE_UNSPECIFIED: _ClassVar[MemberRole]
    MEMBER_ROLE_PREFILL: _ClassVar[MemberRole]
    MEMBER_ROLE_DECODE: _ClassVar[MemberRole]
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_PREFILL: MemberRole
MEMBER_ROLE_DECODE: MemberRole

class WatchRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("info", "load", "prefixes")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    load: MemberLoad
    prefixes: PrefixNews
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., load: _Optional[_Union[MemberLoad, _Mapping]] = ..., prefixes: _Optional[_Union[PrefixNews, _Mapping]] = ...) -> None: ...

class PrefixNews(_message.Message):
    __slots__ = ("anew", "stored", "evicted")
    ANEW_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, anew: _Optional[bool] = ..., stored: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class MemberInfo(_message.Message):
    __slots__ = ("peer", "role", "model", "model_snapshot", "layout_fingerprint", "page_tokens", "total_pages", "context_tokens", "vocabulary_size", "max_sequences", "max_queued_tokens", "computes_prompts", "prefix_identity", "sequence_pages", "adapters")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    peer: _grant_pb2.Peer
    role: MemberRole
    model: str
    model_snapshot: str
    layout_fingerprint: str
    page_tokens: int
    total_pages: int
    context_tokens: int
    vocabulary_size: int
    max_sequences: int
    max_queued_tokens: int
    computes_prompts: bool
    prefix_identity: bytes
    sequence_pages: int
    adapters: _containers.RepeatedCompositeFieldContainer[_grant_pb2.Adapter]
    def __init__(self, peer: _Optional[_Union[_grant_pb2.Peer, _Mapping]] = ..., role: _Optional[_Union[MemberRole, str]] = ..., model: _Optional[str] = ..., model_snapshot: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., page_tokens: _Optional[int] = ..., total_pages: _Optional[int] = ..., context_tokens: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., computes_prompts: _Optional[bool] = ..., prefix_identity: _Optional[bytes] = ..., sequence_pages: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_grant_pb2.Adapter, _Mapping]]] = ...) -> None: ...

class MemberLoad(_message.Message):
    __slots__ = ("free_pages", "running_sequences", "waiting_sequences", "waiting_tokens", "quarantined_pages", "draining", "steps", "prefill_tokens_per_s", "decode_step_s", "preempted_sequences", "expected_output_tokens", "pages", "paused_sequences", "tokens")
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    free_pages: int
    running_sequences: int
    waiting_sequences: int
    waiting_tokens: int
    quarantined_pages: int
    draining: bool
    steps: int
    prefill_tokens_per_s: float
    decode_step_s: float
    preempted_sequences: int
    expected_output_tokens: int
    pages: PagesByState
    paused_sequences: int
    tokens: int
    def __init__(self, free_pages: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., draining: _Optional[bool] = ..., steps: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., preempted_sequences: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., pages: _Optional[_Union[PagesByState, _Mapping]] = ..., paused_sequences: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PagesByState(_message.Message):
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

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("books", "faults")
    class BooksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    books: _containers.ScalarMap[str, int]
    faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, books: _Optional[_Mapping[str, int]] = ..., faults: _Optional[_Iterable[str]] = ...) -> None: ...

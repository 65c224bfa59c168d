from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: str
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("member", "incarnation", "address")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member: str
    incarnation: str
    address: str
    def __init__(self, member: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant_id", "key", "decode", "layout_fingerprint", "first_position", "token_count", "groups", "landing_row", "endpoint", "expires_after_s")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LANDING_ROW_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    grant_id: bytes
    key: AttemptKey
    decode: Peer
    layout_fingerprint: str
    first_position: int
    token_count: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupPages]
    landing_row: int
    endpoint: Endpoint
    expires_after_s: float
    def __init__(self, grant_id: _Optional[bytes] = ..., key: _Optional[_Union[AttemptKey, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., layout_fingerprint: _Optional[str] = ..., first_position: _Optional[int] = ..., token_count: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupPages, _Mapping]]] = ..., landing_row: _Optional[int] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., expires_after_s: _Optional[float] = ...) -> None: ...

class GroupPages(_message.Message):
    __slots__ = ("page_ids", "generations")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("agent", "metadata", "metadata_crc32", "slabs")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    METADATA_CRC32_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    metadata_crc32: int
    slabs: _containers.RepeatedCompositeFieldContainer[Slab]
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., metadata_crc32: _Optional[int] = ..., slabs: _Optional[_Iterable[_Union[Slab, _Mapping]]] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("base_address", "size_bytes", "unit_bytes")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    size_bytes: int
    unit_bytes: int
    def __init__(self, base_address: _Optional[int] = ..., size_bytes: _Optional[int] = ..., unit_bytes: _Optional[int] = ...) -> None: ...

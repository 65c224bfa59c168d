"""Reading client messages from raw bytes, so that a message that cannot be read is answered with the field's name.

gRPC's own deserialiser would answer INTERNAL. Proto3 refuses a message with a string that is not valid UTF-8 without
saying which; the wire format is walked a second time to find it.
"""

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rpc.status import StatusError, Violation, invalid_argument

M = TypeVar("M", bound=Message)

_LENGTH_DELIMITED = 2
#: Nesting of messages that is followed when looking for a bad string.
_DEPTH_MAX = 8


def parse(kind: type[M], raw: bytes) -> M:
    """`raw` as a message of `kind`. Raises StatusError (INVALID_ARGUMENT) naming the field that cannot be read."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise unreadable(kind.DESCRIPTOR, raw) from None


def unreadable(descriptor: Any, raw: bytes) -> StatusError:
    """Why `raw` is no message of this kind."""
    path = invalid_utf8_field(descriptor, raw)
    if path is None:
        return invalid_argument([Violation("", f"these bytes are not a {descriptor.full_name}", "UNREADABLE_MESSAGE")])
    return invalid_argument([Violation(path, "a string must be valid UTF-8", "INVALID_UTF8")])


def invalid_utf8_field(descriptor: Any, raw: bytes, depth: int = 0) -> str | None:
    """Path of the first string in `raw` that is not valid UTF-8, such as chat.messages[2].content; None: there is none."""
    try:
        # An empty message keeps every field as unknown, whatever its bytes are.
        unknown: Any = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError:
        return None
    seen: dict[int, int] = {}
    for one in unknown:
        field = descriptor.fields_by_number.get(one.field_number)
        if field is None or one.wire_type != _LENGTH_DELIMITED:
            continue
        index = seen.get(field.number, 0)
        seen[field.number] = index + 1
        name = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(one.data):
            return name
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth < _DEPTH_MAX:
            inner = invalid_utf8_field(field.message_type, one.data, depth + 1)
            if inner is not None:
                return f"{name}.{inner}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True

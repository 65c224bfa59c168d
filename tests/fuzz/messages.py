"""Random protobuf messages of any kind, and bytes that are nearly one. For hypothesis."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

#: Messages in messages are made to this depth.
DEPTH_MAX = 4
#: Grammars are compiled in a child process of their own, whose tests are its own too: here they would only cost time.
LEFT_OUT = frozenset({"tandem.v1.Grammar"})

_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.one_of(st.integers(-2, 20), st.integers(-(2**31), 2**31 - 1)),
    FieldDescriptor.CPPTYPE_INT64: st.one_of(st.integers(-2, 20), st.integers(-(2**63), 2**63 - 1)),
    FieldDescriptor.CPPTYPE_UINT32: st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.one_of(st.floats(0, 2), st.floats()),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    # Numbers of enums are open: what nobody knows yet may come.
    FieldDescriptor.CPPTYPE_ENUM: st.one_of(st.integers(0, 6), st.integers(-(2**31), 2**31 - 1)),
}
_TEXT = st.one_of(st.sampled_from(["", "r-1", "r-2", "a", "default"]), st.text(max_size=40))


@st.composite
def messages(draw: Any, kind: type[Message], depth: int = 0, known: Sequence[Message] = ()) -> Message:
    """A message of `kind` with some fields set to anything of their type; now and then one of `known`, changed."""
    made = kind()
    if known and draw(st.booleans()):
        made.CopyFrom(draw(st.sampled_from(list(known))))
    usable = [one for one in kind.DESCRIPTOR.fields if depth < DEPTH_MAX or one.message_type is None]
    usable = [one for one in usable if one.message_type is None or one.message_type.full_name not in LEFT_OUT]
    for one in draw(st.lists(st.sampled_from(usable), max_size=6)) if usable else ():
        _set(draw, made, one, depth)
    return made


def _set(draw: Any, made: Message, one: FieldDescriptor, depth: int) -> None:
    count = draw(st.integers(0, 4)) if one.is_repeated else 1
    if one.message_type is not None and one.message_type.GetOptions().map_entry:
        return
    if one.is_repeated:
        made.ClearField(one.name)
    for _ in range(count):
        if one.message_type is not None:
            target = getattr(made, one.name).add() if one.is_repeated else getattr(made, one.name)
            target.CopyFrom(draw(messages(type(target), depth + 1)))
            continue
        value = draw(_value(one))
        if one.is_repeated:
            getattr(made, one.name).append(value)
        else:
            setattr(made, one.name, value)


def _value(one: FieldDescriptor) -> Any:
    if one.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXT
    return _NUMBERS[one.cpp_type]


@st.composite
def mutated(draw: Any, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of `whole` with some of them changed, left out, put in or cut off."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data))))
        match draw(st.integers(0, 3)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                del data[at:]
    return bytes(data)


def wire(kind: type[Message], known: Sequence[Message] = ()) -> st.SearchStrategy[bytes]:
    """Bytes to send where a message of `kind` is expected: good ones, nearly good ones, and anything."""
    good = messages(kind, 0, tuple(known)).map(lambda message: message.SerializeToString())
    return st.one_of(good, good, mutated(good), st.binary(max_size=200))

"""The head of a GGUF file: metadata and where the tensors are, without reading the tensors.

The gguf package reads the same, but makes two numpy arrays for each of the ~100 000 strings of a vocabulary (1.8 s for the
default model, at each start of each process) and has no limits. Layout: GGUF specification, versions 2 and 3, little endian.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from text.errors import UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_FIELDS = 4096
MAX_TENSORS = 1 << 16
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4

F32 = 0  # ggml's type number of a float32 tensor

# GGUF's value types with a fixed size, as struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is row-major (rows first); `kind` is ggml's type number; `offset_bytes` counts from the start of the file."""

    shape: tuple[int, ...]
    kind: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything of a GGUF file but the weights."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    rope_divisors: tuple[float, ...]  # the tensor rope_freqs.weight, empty when there is none


class _Cursor:
    """Reads onward through a buffer; running over the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def numbers(self, code: str, count: int = 1) -> tuple[int | float | bool, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.place)
        self.place += struct.calcsize(layout)
        return values

    def count(self, limit: int, what: str, code: str = "Q") -> int:
        value = int(self.numbers(code)[0])
        if value > limit:
            raise ValueError(f"{what} is {value}; at most {limit} is supported")
        return value

    def string(self) -> str:
        size = self.count(MAX_STRING_BYTES, "the length of a string in bytes")
        raw = self.data[self.place : self.place + size]
        if len(raw) != size:
            raise ValueError("a string runs over the end of the file")
        self.place += size
        return raw.decode()

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"value type {kind} is unknown")

    def array(self) -> list[object]:
        kind = int(self.numbers("I")[0])
        count = self.count(MAX_ARRAY_ITEMS, "the length of an array")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        raise ValueError(f"arrays of value type {kind} are not supported")


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file; kept for the process as long as size and time of the file stay. Raises UnsupportedModel."""
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, size_bytes: int, mtime_ns: int) -> GgufHeader:
    del size_bytes, mtime_ns  # part of the cache's key only
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except (ValueError, struct.error, OverflowError) as error:
        raise UnsupportedModel(f"{os.fspath(path)} is no GGUF file that can be read: {error}. Fetch it again.") from error


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.data[:4] != MAGIC:
        raise ValueError("it does not begin with the letters GGUF")
    cursor.place = len(MAGIC)
    version = int(cursor.numbers("I")[0])
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}; {VERSIONS[0]} and {VERSIONS[1]} (little endian) are supported")
    tensor_count = cursor.count(MAX_TENSORS, "the number of tensors")
    field_count = cursor.count(MAX_FIELDS, "the number of metadata fields")
    metadata: dict[str, object] = {}
    for _ in range(field_count):
        name = cursor.string()
        metadata[name] = cursor.value(int(cursor.numbers("I")[0]))
    relative = _tensor_table(cursor, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}; it must be at least 1 byte")
    start = -(-cursor.place // alignment) * alignment
    tensors = {name: TensorInfo(shape, kind, start + offset) for name, (shape, kind, offset) in relative.items()}
    for name, tensor in tensors.items():
        if tensor.offset_bytes >= len(cursor.data):
            raise ValueError(f"tensor {name} begins beyond the end of the file; the file is cut short")
    return GgufHeader(metadata, tensors, _rope_divisors(cursor, tensors.get("rope_freqs.weight")))


def _tensor_table(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    table = {}
    for _ in range(count):
        name = cursor.string()
        dimensions = cursor.count(MAX_DIMENSIONS, f"the number of dimensions of {name}", "I")
        shape = tuple(int(size) for size in reversed(cursor.numbers("Q", dimensions)))
        kind = int(cursor.numbers("I")[0])
        table[name] = (shape, kind, int(cursor.numbers("Q")[0]))
    return table


def _rope_divisors(cursor: _Cursor, tensor: TensorInfo | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if tensor.kind != F32 or len(tensor.shape) != 1:
        raise ValueError("rope_freqs.weight must be a float32 vector")
    cursor.place = tensor.offset_bytes
    return tuple(float(value) for value in cursor.numbers("f", tensor.shape[0]))

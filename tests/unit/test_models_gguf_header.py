"""Reading the head of a GGUF file, with the gguf package as writer and as a second, slower reader."""

import os
import struct
from pathlib import Path

import pytest

from models import UnsupportedModel, gguf_metadata, read_header
from models.gguf_header import MAX_ARRAY_ITEMS, MAX_FIELDS, MAX_STRING_BYTES
from tests.model_files import default_model


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def file_with(path: Path, *fields: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, tail: bytes = bytes(64)) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    path.write_bytes(head + b"".join(fields) + b"".join(tensors) + tail)
    return path


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


@pytest.mark.slow
def test_equals_the_librarys_reader_on_the_default_model() -> None:
    gguf = pytest.importorskip("gguf")
    path = default_model().path
    theirs, ours = gguf.GGUFReader(path), read_header(path)
    expected = {name: value.contents() for name, value in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert {name: (info.kind, info.offset_bytes, info.shape) for name, info in ours.tensors.items()} == {
        item.name: (int(item.tensor_type), int(item.data_offset), tuple(int(size) for size in reversed(item.shape)))
        for item in theirs.tensors
    }


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 1 << 31), 5: ("i", -5)}
    scalars |= {6: ("f", 1.5), 7: ("?", True), 10: ("Q", 1 << 40), 11: ("q", -(1 << 40)), 12: ("d", 0.1)}
    fields = [field(f"n{kind}", kind, struct.pack(f"<{code}", value)) for kind, (code, value) in scalars.items()]
    fields.append(field("text", 8, string("né")))
    fields.append(field("texts", 9, struct.pack("<IQ", 8, 2) + string("a") + string("")))
    fields.append(field("bools", 9, struct.pack("<IQ2?", 7, 2, True, False)))
    metadata = gguf_metadata(file_with(tmp_path / "m.gguf", *fields))
    assert metadata == {
        **{f"n{kind}": value for kind, (_, value) in scalars.items()},
        "text": "né",
        "texts": ["a", ""],
        "bools": [True, False],
    }


def test_tensor_places_and_rope_divisors(tmp_path: Path) -> None:
    fields = [field("general.alignment", 4, struct.pack("<I", 64))]
    table = (tensor("rope_freqs.weight", (2,), offset=64), tensor("w", (3, 4), kind=2))
    path = file_with(tmp_path / "m.gguf", *fields, tensors=table, tail=b"")
    start = -(-path.stat().st_size // 64) * 64
    path.write_bytes(path.read_bytes().ljust(start + 64, b"\0") + struct.pack("<2f", 1.0, 8.0))
    header = read_header(path)
    assert (header.tensors["w"].shape, header.tensors["w"].offset_bytes) == ((3, 4), start)
    assert header.rope_divisors == (1.0, 8.0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = file_with(tmp_path / "m.gguf", field("a", 8, string("one")))
    assert gguf_metadata(path) == {"a": "one"}
    assert read_header(path) is read_header(path)
    file_with(path, field("a", 8, string("two")))
    os.utime(path, ns=(1, 1))
    assert gguf_metadata(path) == {"a": "two"}


HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "letters GGUF"),
        (b"", "no GGUF file"),
        (b"GGUF", "no GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version is"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version is 1"),
        (b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE, f"at most {MAX_FIELDS}"),
        (b"GGUF" + struct.pack("<I", 3) + HUGE + bytes(8), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE, f"at most {MAX_STRING_BYTES}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 99) + b"short", "runs over the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("a", 9, struct.pack("<I", 8) + HUGE), f"at most {MAX_ARRAY_ITEMS}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("a", 9, struct.pack("<IQ", 9, 1)), "arrays of value type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("a", 99, b""), "value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("a", 8, struct.pack("<Q", 1) + b"\xff"), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("w", (1,), offset=1 << 50), "the file is cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("w", (1,) * 5), "number of dimensions of w is 5"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("general.alignment", 4, bytes(4)), "general.alignment is 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("rope_freqs.weight", (2,), kind=1) + bytes(64), "float32 vector"),
    ],
)
def test_broken_files_end_in_one_typed_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=message):
        read_header(path)

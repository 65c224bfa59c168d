"""Writes docs/api.md: `python tools/api_reference.py > docs/api.md`. A test compares.

Everything in it stands in the .proto files: names, numbers and types, and the comments beside them, which say what a field
means and what its limits are. The port for clients comes whole; of the ports inside a cell, what calls there are and what
travels in them.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"
CLIENT_PACKAGE = "tandem.v1"

HEAD = """# The ports

Made by `make proto` out of the comments in [proto/](../proto/tandem/v1/inference.proto); a test compares.

What every call has in common:

* gRPC over HTTP/2. A call that fails has a status, and in it `google.rpc` details: `ErrorInfo` with a closed `reason`,
  `BadRequest` with a violation for each wrong field and its limit, `RetryInfo` where it makes sense to try again and when.
* A field that is marked `optional` tells unset from zero. Any other number that is not set is 0, any other text is empty.
* What may change between releases, and what may not, is in [upgrade.md](upgrade.md).
"""
_BETWEEN = """# The ports inside a cell

Between routers and members, and for operators. Clients have no use for them, and they may change from one minor release to the
next as [upgrade.md](upgrade.md) says. Fields are in [proto/tandem/pools/v1](../proto/tandem/pools/v1/decode.proto).
"""
#: Numbers of fields in descriptor.proto, of which paths in the source information are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ONEOF, _ENUM_VALUE, _SERVICE_METHOD = 2, 8, 2, 2
_LINT = "buf:lint:ignore"


@dataclass(frozen=True, slots=True)
class _Comments:
    """What stands before the things of a file, by their paths."""

    by_path: Mapping[tuple[int, ...], str]

    def of(self, *path: int) -> str:
        """As one paragraph or several, without directives for tools."""
        lines = [line.strip() for line in self.by_path.get(path, "").splitlines()]
        paragraphs = "\n".join(line for line in lines if not line.startswith(_LINT)).strip().split("\n\n")
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def cell(self, *path: int) -> str:
        """The same for a table."""
        return self.of(*path).replace("\n\n", "<br>").replace("|", "\\|")


def descriptors() -> FileDescriptorSet:
    """All ports, with the comments of their source. Raises RuntimeError when protoc does not take them."""
    sources = sorted(str(path) for path in ROOT.rglob("*.proto"))
    library = files("grpc_tools").joinpath("_proto")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "ports.binpb"
        flags = [f"-I{ROOT}", f"-I{library}", "--include_source_info", f"--descriptor_set_out={made}"]
        if protoc.main(["protoc", *flags, *sources]) != 0:
            raise RuntimeError("protoc refused the ports")
        return FileDescriptorSet.FromString(made.read_bytes())


def page(ports: FileDescriptorSet) -> str:
    """The whole document."""
    inside = [file for file in ports.file if file.package != CLIENT_PACKAGE]
    client = [file for file in ports.file if file.package == CLIENT_PACKAGE]
    parts = [
        HEAD,
        *(part for file in client for part in _whole(file)),
        _BETWEEN,
        *(part for file in inside for part in _short(file)),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _whole(file: FileDescriptorProto) -> Iterator[str]:
    comments = _comments_of(file)
    for number, service in enumerate(file.service):
        yield f"## {service.name}\n\n`{file.package}.{service.name}`. {comments.of(_FILE_SERVICE, number)}"
        rows = [
            _method_row(method, comments.cell(_FILE_SERVICE, number, _SERVICE_METHOD, at))
            for at, method in enumerate(service.method)
        ]
        yield _table(("call", "request", "answer", "what it does"), rows)
    yield "## Messages"
    for number, message in enumerate(file.message_type):
        yield from _message(message, (_FILE_MESSAGE, number), comments)
    yield "## Enums"
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, number, comments)


def _message(message: DescriptorProto, path: tuple[int, ...], comments: _Comments) -> Iterator[str]:
    yield f"### {message.name}\n\n{comments.of(*path)}"
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    rows = []
    for at, field in enumerate(message.field):
        text = comments.cell(*path, _MESSAGE_FIELD, at)
        if field.HasField("oneof_index") and not field.proto3_optional:
            text = f"One of `{message.oneof_decl[field.oneof_index].name}`. {text}"
        rows.append([str(field.number), f"`{field.name}`", _type_words(field, maps), text])
    if rows:
        yield _table(("no", "field", "type", "meaning and limits"), rows)
    for at, oneof in enumerate(message.oneof_decl):
        if about := comments.of(*path, _MESSAGE_ONEOF, at):
            yield f"`{oneof.name}`: {about}"


def _enum(enum: EnumDescriptorProto, number: int, comments: _Comments) -> Iterator[str]:
    yield f"### {enum.name}\n\n{comments.of(_FILE_ENUM, number)}"
    rows = [
        [str(value.number), f"`{value.name}`", comments.cell(_FILE_ENUM, number, _ENUM_VALUE, at)]
        for at, value in enumerate(enum.value)
    ]
    yield _table(("no", "value", "meaning"), rows)


def _short(file: FileDescriptorProto) -> Iterator[str]:
    """Services with their calls, and messages with a sentence each."""
    comments = _comments_of(file)
    for number, service in enumerate(file.service):
        yield f"## {service.name}\n\n`{file.package}.{service.name}`. {comments.of(_FILE_SERVICE, number)}"
        rows = [
            _method_row(method, comments.cell(_FILE_SERVICE, number, _SERVICE_METHOD, at), linked=False)
            for at, method in enumerate(service.method)
        ]
        yield _table(("call", "request", "answer", "what it does"), rows)
    yield f"## Messages of {Path(file.name).name}"
    named = [(one.name, comments.cell(_FILE_MESSAGE, at)) for at, one in enumerate(file.message_type)]
    named += [(one.name, comments.cell(_FILE_ENUM, at)) for at, one in enumerate(file.enum_type)]
    yield _table(("name", "what it is"), [[f"`{name}`", about] for name, about in named])


def _method_row(method: MethodDescriptorProto, about: str, *, linked: bool = True) -> list[str]:
    def name(kind: str, streams: bool) -> str:
        last = kind.rpartition(".")[2]
        word = f"[{last}](#{last.lower()})" if linked else f"`{last}`"
        return f"stream of {word}" if streams else word

    asked, told = name(method.input_type, method.client_streaming), name(method.output_type, method.server_streaming)
    return [f"`{method.name}`", asked, told, about]


def _type_words(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    last = field.type_name.rpartition(".")[2]
    if last in maps:
        key, value = maps[last].field
        return f"map of {_plain(key)} to {_plain(value)}"
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return ("repeated " if repeated else "optional " if field.proto3_optional else "") + _plain(field)


def _plain(field: FieldDescriptorProto) -> str:
    if not field.type_name:
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    last = field.type_name.rpartition(".")[2]
    known = field.type_name.startswith(f".{CLIENT_PACKAGE}.")
    return f"[{last}](#{last.lower()})" if known else f"`{field.type_name.removeprefix('.')}`"


def _comments_of(file: FileDescriptorProto) -> _Comments:
    return _Comments({tuple(one.path): one.leading_comments for one in file.source_code_info.location})


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


if __name__ == "__main__":
    sys.stdout.write(page(descriptors()))

"""Where the processes of a cell of this machine are: a file in the folder of its run, for other commands of the same user.

It goes away with the folder, so one that is there tells of a cell that runs, or of one whose logs are kept.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

NAME = "cell.json"
#: Folders of runs begin so.
FOLDER_PREFIX = "tandem-"


class Process(msgspec.Struct, frozen=True):
    """One process: what it is, its gRPC server (host:port), where its metrics are (host:port, empty: nowhere), its id."""

    kind: str
    name: str
    address: str
    metrics: str
    pid: int


class CellFile(msgspec.Struct, frozen=True):
    """A cell of this machine. `store`: the URL of the request store."""

    store: str
    processes: tuple[Process, ...]

    def of_kind(self, kind: str) -> tuple[Process, ...]:
        """Its processes of one kind: router, prefill or decode."""
        return tuple(one for one in self.processes if one.kind == kind)

    def metrics(self) -> list[str]:
        """Where metrics are, as host:port."""
        return [one.metrics for one in self.processes if one.metrics]


def process_of(name: str, pid: int, ready: dict[str, Any]) -> Process:
    """From what a process said when it became ready."""
    address, port = str(ready["address"]), ready.get("metrics_port")
    metrics = f"{address.rpartition(':')[0]}:{port}" if port else ""
    return Process(name.partition("-")[0], name, address, metrics, pid)


def write_cell_file(folder: Path, cell: CellFile) -> None:
    """Whole or not at all, and readable by its user only: the store's address may hold a password."""
    with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as made:
        made.write(msgspec.json.encode(cell))
    Path(made.name).replace(folder / NAME)


def find_cell(address: str) -> CellFile | None:
    """The running cell of this machine and user that has a router there; None when there is none."""
    for cell in _cells():
        for router in cell.of_kind("router"):
            if _same(router.address, address) and _lives(router.pid):
                return cell
    return None


def _cells() -> Iterator[CellFile]:
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{NAME}"):
        try:
            if path.stat().st_uid == os.getuid():
                yield msgspec.json.decode(path.read_bytes(), type=CellFile)
        except (OSError, msgspec.DecodeError):
            continue  # it ended just now, or another release wrote it


def _same(one: str, other: str) -> bool:
    """Whether two addresses of this machine are the same, however its name is written."""

    def plain(address: str) -> tuple[str, str]:
        host, _, port = address.rpartition(":")
        return ("127.0.0.1" if host in ("localhost", "0.0.0.0", "[::1]", "[::]") else host, port)

    return plain(one) == plain(other)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""`python -m kv_transfer.doctor`: does NIXL carry bytes here, and how fast: real writes between two processes, by one transport.

One JSON object on standard output. This process is the reader, a child of it the writer; both hold their memory as members do,
and the last write's bytes are compared.
"""

import multiprocessing
import os
import sys
import time
import zlib
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kv_transfer import nixl
from kv_transfer.offer import Endpoint, HandoverError, Slab
from kv_transfer.ports import Push, Range
from rpc.incarnation import new_incarnation
from rpc.settings import load_or_exit, setting

#: Of each transfer: the length of a page of a middling model.
RANGE_BYTES = 64 * 1024
POLL_S = 50e-6
WRITE_LIMIT_S = 20.0
#: How long writes are repeated.
MEASURE_S = 0.75
WRITES_MAX = 200
NOTICE = b"doctor"


class TransferDoctorSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is measured."""

    transport: Annotated[Literal["tcp", "cma"], setting("NIXL over TCP, or over shared memory of one host.")] = "tcp"
    net_devices: Annotated[str, setting("Network devices that NIXL listens on; unset: UCX chooses.", max_length=1024)] = "lo"
    mebibytes: Annotated[int, setting("Of each write.", "MiB", ge=1, le=1024)] = 16


class TransferFindings(msgspec.Struct, frozen=True):
    """problem: why nothing was carried, empty when all is well; then times in seconds and bytes a second, of the median write."""

    transport: str
    net_devices: str
    problem: str = ""
    connect_s: float = 0.0
    writes: int = 0
    write_s: float = 0.0
    bytes_per_s: float = 0.0


class _Memory:
    """Anonymous memory in two slabs, as members have pages and landing rows."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = np.zeros(size_bytes + RANGE_BYTES, np.uint8)
        first = self.bytes.ctypes.data
        self.slabs = (Slab(first, size_bytes, RANGE_BYTES), Slab(first + size_bytes, RANGE_BYTES, RANGE_BYTES))

    def content(self) -> int:
        """CRC-32 of what is written."""
        return zlib.crc32(self.bytes[: self.slabs[0].size_bytes].tobytes())


def measure(settings: TransferDoctorSettings) -> TransferFindings:
    """Both ends. What goes wrong is a finding."""
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(settings, theirs), daemon=True)
    writer.start()
    theirs.close()
    try:
        nixl.prepare_environment(settings.transport, settings.net_devices or None)
        memory = _Memory(settings.mebibytes * 1024 * 1024)
        receiver = nixl.NixlReceiver(new_incarnation(), memory.slabs)
        line.send(receiver.endpoint(_answer(line)))
        connect_s, writes_s, content = _answer(line)
        if content != memory.content():
            return _failed(settings, "other bytes arrived than were written")
        write_s = sorted(writes_s)[len(writes_s) // 2]
        size = memory.slabs[0].size_bytes
        return TransferFindings(settings.transport, settings.net_devices, "", connect_s, len(writes_s), write_s, size / write_s)
    except (HandoverError, ImportError, OSError, EOFError, TimeoutError) as error:
        return _failed(settings, f"{type(error).__name__}: {error}")
    finally:
        line.close()
        writer.join(1.0)
        if writer.is_alive():
            writer.kill()


def _answer(line: Connection) -> Any:
    """What the writer says next. Raises TimeoutError, OSError with what it failed at."""
    if not line.poll(WRITE_LIMIT_S):
        raise TimeoutError(f"the writing process did not answer within {WRITE_LIMIT_S:.0f} s")
    told = line.recv()
    if isinstance(told, Exception):
        raise OSError(str(told))
    return told


def _failed(settings: TransferDoctorSettings, problem: str) -> TransferFindings:
    return TransferFindings(settings.transport, settings.net_devices, problem)


def _write(settings: TransferDoctorSettings, line: Connection) -> None:
    """The child: name, then an endpoint comes, then what was measured is sent."""
    try:
        nixl.prepare_environment(settings.transport, settings.net_devices or None)
        memory = _Memory(settings.mebibytes * 1024 * 1024)
        memory.bytes[:] = np.frombuffer(os.urandom(RANGE_BYTES), np.uint8).repeat(len(memory.bytes) // RANGE_BYTES)
        sender = nixl.NixlSender("doctor", memory.slabs)
        line.send(new_incarnation())
        line.send(_timed_writes(sender, line.recv(), memory))
    except (HandoverError, ImportError, OSError, EOFError, TimeoutError) as error:
        line.send(OSError(f"{type(error).__name__}: {error}"))
    line.poll(None)  # the memory stays until the reader has looked


def _timed_writes(sender: nixl.NixlSender, endpoint: Endpoint, memory: _Memory) -> tuple[float, list[float], int]:
    """Seconds to connect with the first write, seconds of each later one, CRC-32 of what was written."""
    ours, theirs = memory.slabs[0], endpoint.slabs[0]
    ranges = tuple(Range(ours.address(unit), theirs.address(unit), RANGE_BYTES) for unit in range(ours.units))
    began = time.perf_counter()
    sender.connect(endpoint)
    _written(sender, Push(0, endpoint.agent, ranges, NOTICE))
    connect_s = time.perf_counter() - began
    writes_s: list[float] = []
    last = time.perf_counter() + MEASURE_S
    while not writes_s or (time.perf_counter() < last and len(writes_s) < WRITES_MAX):
        began = time.perf_counter()
        _written(sender, Push(len(writes_s) + 1, endpoint.agent, ranges, NOTICE))
        writes_s.append(time.perf_counter() - began)
    return connect_s, writes_s, memory.content()


def _written(sender: nixl.NixlSender, push: Push) -> None:
    """One write to its end. Raises OSError, TimeoutError."""
    last = time.monotonic() + WRITE_LIMIT_S
    sender.post(push)
    while not (results := sender.poll()):
        if time.monotonic() > last:
            raise TimeoutError(f"a write did not end within {WRITE_LIMIT_S:.0f} s")
        time.sleep(POLL_S)
    if not results[0].ok:
        raise OSError(f"{results[0].cause}: {results[0].detail}")


def main() -> int:
    """Prints what was found; 0 also when nothing was carried."""
    settings = load_or_exit(TransferDoctorSettings, prog="python -m kv_transfer.doctor", description="What NIXL carries here.")
    print(msgspec.json.encode(measure(settings)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

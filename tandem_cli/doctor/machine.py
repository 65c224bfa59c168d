"""What this machine has: read, not judged."""

import ctypes
import os
import platform
import resource
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
#: How long the two clocks are compared.
CLOCK_WATCH_S = 0.2
#: `struct timex` is smaller than that on every Linux.
_TIMEX_BYTES = 512
#: What adjtimex returns when the clock is not synchronised.
_TIME_ERROR = 5


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. limit_left: what the cgroup still allows, None without a limit. shm_free: None where there is no /dev/shm."""

    available: int
    limit_left: int | None
    shm_free: int | None


@dataclass(frozen=True, slots=True)
class Cpus:
    """usable: cores that this process may run on. quota: cores' worth of time that the cgroup allows, None without a limit."""

    model: str
    usable: int
    quota: float | None
    omp_threads: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of a process, None for none: open files, locked bytes; processes of the cgroup that may still be made."""

    open_files: int | None
    locked_bytes: int | None
    pids_left: int | None


@dataclass(frozen=True, slots=True)
class Clocks:
    """drift_s: by how much wall clock and monotonic clock came apart in CLOCK_WATCH_S. synchronised: None where nobody tells."""

    resolution_s: float
    drift_s: float
    synchronised: bool | None


def read_cpus() -> Cpus:
    """Cores, quota, and what OMP_NUM_THREADS says."""
    text = _text(PROC / "cpuinfo") or ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = None
    if found := (_text(CGROUP / "cpu.max") or "").split():
        quota = None if found[0] == "max" else int(found[0]) / int(found[1])
    return Cpus(names[0] if names else platform.processor(), usable, quota, os.environ.get("OMP_NUM_THREADS", ""))


def read_memory() -> Memory:
    """Now."""
    values = {line.partition(":")[0]: line.split() for line in (_text(PROC / "meminfo") or "").splitlines()}
    available = int(values["MemAvailable"][1]) * 1024 if "MemAvailable" in values else 0
    most, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    left = None if most is None or used is None else max(0, most - used)
    return Memory(available, left, shutil.disk_usage(SHM).free if SHM.is_dir() else None)


def read_limits() -> Limits:
    """Of this process: its children have the same."""
    most, used = _number(CGROUP / "pids.max"), _number(CGROUP / "pids.current")
    left = None if most is None or used is None else most - used
    return Limits(_soft(resource.RLIMIT_NOFILE), _soft(resource.RLIMIT_MEMLOCK), left)


def read_clocks() -> Clocks:
    """Takes CLOCK_WATCH_S."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_WATCH_S)
    drift_s = (time.time() - wall) - (time.monotonic() - steady)
    return Clocks(time.get_clock_info("monotonic").resolution, drift_s, _synchronised())


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices."""
    return sorted(one.name for one in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def disk_free(folder: Path) -> int | None:
    """Bytes that are free where the folder is or would be; None when it cannot be written to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None


def port_problem(listen: str) -> str:
    """Why nobody can listen at host:port, empty when one can."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def _synchronised() -> bool | None:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _soft(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value


def _number(path: Path) -> int | None:
    """A number out of a file of the kernel; None for "max" and where there is no such file."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None

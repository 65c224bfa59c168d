"""Names of incarnations, and proof that one has died.

Shared memory (CMA) cannot be fenced: the writer's CPU writes into our memory directly. There only the writer's death ends its
writes, and only the kernel that runs both can tell. So an incarnation's name says which process it is, as that kernel sees it.
"""

import os
import re
import secrets
from pathlib import Path

_FORM = re.compile(r"(?P<boot>[0-9a-f]{8})\.(?P<space>\d+)\.(?P<pid>\d+)\.(?P<start>\d+)\.[0-9a-f]{12}")
_PROC = Path("/proc")
# Field 22 of /proc/PID/stat is the start time in clock ticks; behind the command's closing bracket field 3 is the first.
_START_FIELD = 22 - 3


def new_incarnation() -> str:
    """A name for this process that no other start has: boot, PID namespace, PID, start time, 48 random bits (Linux)."""
    pid = os.getpid()
    return f"{_boot()}.{_pid_space()}.{pid}.{_start_ticks(pid)}.{secrets.token_hex(6)}"


def proven_dead(incarnation: str) -> bool:
    """Whether the process of that name certainly runs no more. False also when this kernel cannot tell."""
    found = _FORM.fullmatch(incarnation)
    if found is None or found["boot"] != _boot() or int(found["space"]) != _pid_space():
        return False
    return _start_ticks(int(found["pid"])) != int(found["start"])


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:8]


def _pid_space() -> int:
    return (_PROC / "self/ns/pid").stat().st_ino


def _start_ticks(pid: int) -> int | None:
    """When a process started; None when there is none, or it is a zombie (its memory is gone and it writes no more)."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])

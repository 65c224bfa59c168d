"""What the processes of a cell take from the machine and hold, as figures by name."""

import json
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from tests.chaos.cell import STORE, ChaosCell, Process
from tests.waiting import until

#: For a process to tell its objects: it may be in a step, and the machine busy.
TELL_S = 120.0
_MIB = 1024.0
SHM = "/dev/shm/"
#: Kinds of keys that stand for something that is kept for a while: records, and what they point to.
KEPT_KINDS = ("request",)
STORE_TIMEOUT_S = 5.0


def of_process(pid: int) -> dict[str, float]:
    """rss, pss, uss, anonymous in MiB; threads, descriptors, sockets, shm_files as counts. As the kernel has them now.

    anonymous: what no file stands behind, so that nobody can take it back while the machine is short of memory.
    """
    root = Path(f"/proc/{pid}")
    status, memory = _fields(root / "status"), _fields(root / "smaps_rollup")
    links = [_link(one) for one in (root / "fd").iterdir()]
    return {
        "rss": memory["Rss"] / _MIB,
        "pss": memory["Pss"] / _MIB,
        "uss": (memory["Private_Clean"] + memory["Private_Dirty"]) / _MIB,
        "anonymous": status["RssAnon"] / _MIB,
        "threads": status["Threads"],
        "descriptors": float(len(links)),
        "sockets": float(sum(link.startswith("socket:") for link in links)),
        "shm_files": float(len(shm_files(pid))),
    }


def shm_files(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped, by path; those already removed too."""
    maps = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
    return {line[line.index(SHM) :].removesuffix(" (deleted)") for line in maps if SHM in line}


async def of_python(process: Process) -> dict[str, float]:
    """objects, blocks: what its interpreter holds after a collection. The process is ready."""
    told = process.told_objects
    told.unlink(missing_ok=True)
    process.send(signal.SIGUSR2)

    async def there() -> bool:
        return told.exists()

    await until(there, TELL_S, f"{process.name} tells its objects")
    values = json.loads(told.read_text())
    return {"objects": float(values["objects"]), "blocks": float(values["blocks"])}


def types_of(process: Process) -> dict[str, int]:
    """The most frequent types of what was told last; none where nothing was."""
    told = process.told_objects
    return dict(json.loads(told.read_text())["types"]) if told.exists() else {}


def of_store(socket_path: str) -> dict[str, float]:
    """records, other_keys as counts; used_mib: memory as the store counts it."""
    with redis.Redis(unix_socket_path=socket_path, socket_timeout=STORE_TIMEOUT_S, decode_responses=True) as client:
        kinds = keys_by_kind(list(client.scan_iter(count=1000)))
        used = float(client.info("memory")["used_memory"])
    kept = sum(kinds[kind] for kind in KEPT_KINDS)
    return {"records": float(kept), "other_keys": float(sum(kinds.values()) - kept), "used_mib": used / _MIB / _MIB}


def keys_by_kind(keys: list[str]) -> Counter[str]:
    """How many keys there are of each kind: what stands between the cell's tag and the next colon."""
    return Counter(key.partition("}:")[2].partition(":")[0] for key in keys)


@dataclass(slots=True)
class SharedMemory:
    """Files of shared memory that a process of the cell had: those that nobody has any more must be gone."""

    _seen: set[str] = field(default_factory=set)

    def look(self, cell: ChaosCell) -> list[str]:
        """Files that no running process of the cell has and that still exist."""
        now: set[str] = set()
        for process in cell.processes.values():
            if process.running and process.popen is not None:
                now |= shm_files(process.popen.pid)
        self._seen |= now
        return sorted(path for path in self._seen - now if Path(path).exists())


async def of_all(cell: ChaosCell) -> Mapping[str, dict[str, float]]:
    """Every process by name.start. To be called at rest, when all are ready."""
    found = {}
    for process in cell.processes.values():
        assert process.popen is not None
        figures = of_process(process.popen.pid)
        figures |= of_store(process.address) if process.name == STORE else await of_python(process)
        found[f"{process.name}.{process.starts}"] = figures
    return found


def log_bytes(cell: ChaosCell) -> int:
    """Of the logs of all starts."""
    return sum(log.stat().st_size for log in cell.folder.glob("*.log"))


def _fields(path: Path) -> dict[str, float]:
    """The numbers of a file of lines `Name: number …`."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        first = rest.split()[:1]
        if first and first[0].isdecimal():
            found[name] = float(first[0])
    return found


def _link(path: Path) -> str:
    """What a descriptor leads to; one that is closed meanwhile to nothing."""
    try:
        return str(path.readlink())
    except OSError:
        return ""

"""Whether something else used this machine's CPUs while a run was measured: from /proc, over the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
#: A run is called disturbed when processes that are not its own used more than this share of all CPU time.
OTHERS_SHARE_MAX = 0.05
#: Or when the host gave more than this share of the time to others.
STEAL_SHARE_MAX = 0.02
#: Columns of /proc/stat's line `cpu`.
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of the CPU time of the whole machine, 0 to 1, over one run."""

    others_share: float
    steal_share: float

    @property
    def disturbed(self) -> bool:
        """Whether the run's figures are in doubt."""
        return self.others_share > OTHERS_SHARE_MAX or self.steal_share > STEAL_SHARE_MAX

    def __str__(self) -> str:
        return f"others {self.others_share:.1%}, steal {self.steal_share:.1%}"


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks so far: of the machine, and of every process by (id, start)."""

    total: int
    busy: int
    steal: int
    processes: dict[tuple[int, int], int]
    parents: dict[tuple[int, int], int]


def read_cpu_times() -> CpuTimes:
    """Now. A process that ends between two readings is not known afterwards: its last ticks count as somebody else's."""
    stat = (PROC / "stat").read_text()
    processes, parents = {}, {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            key = (int(entry.name), int(fields[19]))
            processes[key] = int(fields[11]) + int(fields[12])
            parents[key] = int(fields[1])
    return cpu_times(stat, processes, parents)


def cpu_times(stat: str, processes: dict[tuple[int, int], int], parents: dict[tuple[int, int], int]) -> CpuTimes:
    """From the text of /proc/stat."""
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    idle = ticks[_IDLE] + ticks[_IOWAIT]
    return CpuTimes(sum(ticks), sum(ticks) - idle - ticks[_STEAL], ticks[_STEAL], processes, parents)


def between(before: CpuTimes, after: CpuTimes, roots: Sequence[int], alone: Sequence[int] = ()) -> Disturbance:
    """What was not of the processes `roots` and their descendants, nor of the processes `alone`."""
    total = max(1, after.total - before.total)
    own = {*family(after, roots), *(key for key in after.processes if key[0] in alone)}
    used = sum(after.processes[key] - before.processes.get(key, 0) for key in own)
    others = max(0, after.busy - before.busy - used)
    return Disturbance(others / total, max(0, after.steal - before.steal) / total)


def family(times: CpuTimes, roots: Sequence[int]) -> list[tuple[int, int]]:
    """(id, start) of these processes and of all their descendants."""
    children: dict[int, list[tuple[int, int]]] = {}
    for key, parent in times.parents.items():
        children.setdefault(parent, []).append(key)
    found = [key for key in times.processes if key[0] in roots]
    for key in found:
        found += [child for child in children.get(key[0], ()) if child not in found]
    return found

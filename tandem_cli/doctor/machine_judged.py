"""What a machine must have for a cell. Pure: facts in, findings out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_cli.doctor.finding import Finding, fails, ok, skipped, warning
from tandem_cli.doctor.machine import Clocks, Cpus, Limits, Memory

MIB, GIB = 1024**2, 1024**3
PYTHON_LEAST = (3, 11)
#: A receiving agent of NIXL takes about 13 descriptors, a member may have 64 of them, and each stream has its own.
OPEN_FILES_LEAST, OPEN_FILES_GOOD = 1024, 4096
SHM_GOOD = 64 * MIB
PIDS_GOOD = 512
DISK_GOOD = GIB
#: Beside weights and KV: interpreter, torch, buffers of gRPC and NIXL.
PROCESS_BYTES = 600 * MIB
CLOCK_DRIFT_S = 0.01
CLOCK_RESOLUTION_S = 1e-3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run on this machine: members with so many threads each, and bytes of weights and KV in each of them."""

    members: int
    threads: int
    weight_bytes: int
    kv_bytes: int

    @property
    def bytes(self) -> int:
        """Of all members."""
        return self.members * (self.weight_bytes + self.kv_bytes + PROCESS_BYTES)


def judge_python(version: tuple[int, ...], implementation: str) -> Finding:
    """Of the interpreter that runs this."""
    words = f"{implementation} {'.'.join(map(str, version))}"
    if version < PYTHON_LEAST:
        return fails("python", words, f"use Python {'.'.join(map(str, PYTHON_LEAST))} or newer")
    return ok("python", words)


def judge_packages(missing: Mapping[str, str], wrong: Mapping[str, str], seen: int) -> Finding:
    """missing and wrong: what is asked for, by package; wrong ones have another version, which is told with it."""
    told = [f"{name} is not installed ({wanted})" for name, wanted in missing.items()]
    told += [f"{name} is {found}" for name, found in wrong.items()]
    if told:
        return fails("packages", "; ".join(told), "make setup, or pip install 'tandem-serving[router,pool]'")
    return ok("packages", f"all {seen} that a cell needs are here, in versions that fit")


def judge_cpus(cpus: Cpus, plan: Plan) -> Finding:
    """Cores against the threads of the members."""
    wanted = plan.members * plan.threads
    cores = min(float(cpus.usable), cpus.quota or cpus.usable)
    words = f"{cpus.model}: {cores:g} cores for {plan.members} members of {plan.threads} threads"
    if cpus.omp_threads.isdecimal() and int(cpus.omp_threads) > cores:
        return warning(
            "cores", f"{words}, OMP_NUM_THREADS={cpus.omp_threads}", f"unset it, or OMP_NUM_THREADS={max(1, int(cores))}"
        )
    if wanted > cores:
        return warning("cores", words, "fewer members or --threads: more threads than cores slow one another down")
    return ok("cores", words)


def judge_memory(memory: Memory, plan: Plan) -> Finding:
    """What the members need against what is left."""
    left = memory.available if memory.limit_left is None else min(memory.available, memory.limit_left)
    limited = memory.limit_left is not None and memory.limit_left < memory.available
    words = f"{plan.members} members need about {size(plan.bytes)}, {size(left)} are left" + (" in the cgroup" if limited else "")
    change = "less --kv-tokens, a smaller model or --weight-quantisation int8" + (", or a higher memory limit" if limited else "")
    if plan.bytes > left:
        return fails("memory", words, change)
    if plan.bytes > 0.8 * left:
        return warning("memory", words, change)
    return ok("memory", words)


def judge_shared_memory(memory: Memory) -> Finding:
    """/dev/shm: what moves bytes between processes of one host keeps its queues there."""
    if memory.shm_free is None:
        return warning("/dev/shm", "there is none", "mount a tmpfs there, or use --transport tcp")
    if memory.shm_free < SHM_GOOD:
        return warning(
            "/dev/shm", f"{size(memory.shm_free)} free", f"at least {size(SHM_GOOD)}: --shm-size of a container, or an emptyDir"
        )
    return ok("/dev/shm", f"{size(memory.shm_free)} free")


def judge_open_files(limits: Limits) -> Finding:
    """Descriptors of one process."""
    if limits.open_files is None or limits.open_files >= OPEN_FILES_GOOD:
        return ok("open files", "no limit" if limits.open_files is None else f"{limits.open_files} for each process")
    change = f"ulimit -n {OPEN_FILES_GOOD} or more (LimitNOFILE of a unit)"
    told = f"{limits.open_files} for each process"
    return (fails if limits.open_files < OPEN_FILES_LEAST else warning)("open files", told, change)


def judge_locked_memory(limits: Limits, rdma: Sequence[str]) -> Finding:
    """Only RDMA pins the memory that it writes from."""
    told = "no limit" if limits.locked_bytes is None else f"{size(limits.locked_bytes)} for each process"
    if limits.locked_bytes is not None and rdma:
        return warning("locked memory", told, "ulimit -l unlimited: RDMA pins the pages")
    return ok("locked memory", told + ("" if rdma else "; TCP and shared memory need none"))


def judge_pids(limits: Limits) -> Finding:
    """Threads and processes that the cgroup still allows."""
    if limits.pids_left is None:
        return ok("processes", "no limit of the cgroup")
    if limits.pids_left < PIDS_GOOD:
        return warning("processes", f"{limits.pids_left} more in this cgroup", f"pids.max with room for {PIDS_GOOD} more")
    return ok("processes", f"{limits.pids_left} more in this cgroup")


def judge_disk(folder: str, free: int | None) -> Finding:
    """The folder of models and compiled kernels."""
    if free is None:
        return fails("cache folder", f"{folder} cannot be written to", "TANDEM_CACHE=/another/folder")
    if free < DISK_GOOD:
        return warning("cache folder", f"{folder}: {size(free)} free", f"{size(DISK_GOOD)} or more for a model and kernels")
    return ok("cache folder", f"{folder}: {size(free)} free")


def judge_port(listen: str, problem: str) -> Finding:
    """Where a router would listen."""
    if problem:
        return fails(
            "port", f"{listen}: {problem}", "stop what listens there, or --listen another address; port 0 takes a free one"
        )
    return ok("port", f"{listen} is free")


def judge_clocks(clocks: Clocks) -> Finding:
    """Deadlines and leases use the monotonic clock, records the wall clock."""
    told = (
        f"resolution {clocks.resolution_s:.0e} s, wall and monotonic clock {abs(clocks.drift_s) * 1e3:.1f} ms apart after a while"
    )
    if abs(clocks.drift_s) > CLOCK_DRIFT_S or clocks.resolution_s > CLOCK_RESOLUTION_S:
        return warning("clocks", told, "let chrony or ntpd slew the clock instead of setting it; times of records jump")
    if clocks.synchronised is False:
        return warning("clocks", f"{told}; not synchronised", "run chrony or ntpd: times of records of several machines differ")
    return ok("clocks", told)


def judge_model(name: str, problem: str, words: str) -> Finding:
    """problem: why it cannot be loaded."""
    if problem:
        return skipped("model", problem, f"tandem models pull {name}, or --model another")
    return ok("model", words)


def judge_rdma(devices: Sequence[str]) -> Finding:
    """There is no transport for them yet."""
    if devices:
        return skipped("rdma", f"{', '.join(devices)}: this release does not write over RDMA; pages travel by TCP")
    return skipped("rdma", "no device")


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"

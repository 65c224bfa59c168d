"""The checks of this machine, each a small function: it measures, and asks a judge."""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import models
from models.cache import cache_folder
from tandem_cli.cell import PAGE_TOKENS
from tandem_cli.doctor import machine, machine_judged, told, told_judged
from tandem_cli.doctor.child import ChildFailed, measured
from tandem_cli.doctor.finding import Finding, fails, skipped
from tandem_cli.doctor.packages import read_packages

#: Kernels may have to be compiled first.
ENGINE_LIMIT_S = 240.0
#: NIXL and UCX take seconds to load, in two processes.
TRANSFER_LIMIT_S = 90.0
STORE_LIMIT_S = 45.0
MIN_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to run here. `redis_url` and `net_devices` are empty where nothing is said; `transfers`: whether NIXL is tried."""

    model: str
    dtype: str
    members: int
    threads: int
    kv_tokens: int
    listen: str
    net_devices: str
    redis_url: str
    cell: str
    transfers: bool


Check = Callable[[Wanted], Iterable[Finding]]


def check_software(wanted: Wanted) -> Iterator[Finding]:
    """Interpreter and packages."""
    yield machine_judged.judge_python(tuple(sys.version_info[:3]), platform.python_implementation())
    found = read_packages()
    yield machine_judged.judge_packages(found.missing, found.wrong, found.seen)


def check_engine(wanted: Wanted) -> Iterator[Finding]:
    """Which backend computes."""
    try:
        found = measured(told.Engine, ["engine.doctor", "--dtype", wanted.dtype], ENGINE_LIMIT_S)
    except ChildFailed as error:
        yield fails("engine", str(error), "pip install 'tandem-serving[pool]', and look at the message")
        return
    yield from told_judged.judge_engine(found)


def check_room(wanted: Wanted) -> Iterator[Finding]:
    """Model, cores, memory, disk."""
    weights, kv, problem, words = _model_bytes(wanted)
    plan = machine_judged.Plan(wanted.members, wanted.threads, weights, kv)
    memory = machine.read_memory()
    yield machine_judged.judge_model(wanted.model, problem, words)
    yield machine_judged.judge_cpus(machine.read_cpus(), plan)
    yield machine_judged.judge_memory(memory, plan)
    yield machine_judged.judge_shared_memory(memory)
    folder = cache_folder()
    yield machine_judged.judge_disk(str(folder), machine.disk_free(folder))


def check_system(wanted: Wanted) -> Iterator[Finding]:
    """Limits, port, clocks."""
    limits = machine.read_limits()
    yield machine_judged.judge_open_files(limits)
    yield machine_judged.judge_locked_memory(limits, machine.rdma_devices())
    yield machine_judged.judge_pids(limits)
    yield machine_judged.judge_port(wanted.listen, machine.port_problem(wanted.listen))
    yield machine_judged.judge_clocks(machine.read_clocks())


def check_transfers(wanted: Wanted) -> Iterator[Finding]:
    """Real writes between two processes, by each transport, and over each device that is named."""
    if not wanted.transfers:
        yield skipped("transfers", "not asked for (--no-transfer)")
        return
    ways = [("nixl tcp (lo)", "tcp", "lo"), ("nixl shared memory", "cma", "lo")]
    ways += [(f"nixl tcp ({device})", "tcp", device) for device in wanted.net_devices.split(",") if device not in ("", "lo")]
    for check, transport, devices in ways:
        argv = ["kv_transfer.doctor", "--transport", transport, "--net-devices", devices]
        try:
            found = measured(told.Transfer, argv, TRANSFER_LIMIT_S)
        except ChildFailed as error:
            found = told.Transfer(transport, devices, str(error), 0.0, 0, 0.0, 0.0)
        yield told_judged.judge_transfer(check, found)
    yield machine_judged.judge_rdma(machine.rdma_devices())


def check_store(wanted: Wanted) -> Iterator[Finding]:
    """The request store, where one is named."""
    if not wanted.redis_url:
        yield skipped("store", "none is named; `tandem up` starts one of its own", "--redis-url to check one")
        return
    yield from told_judged.judge_store(read_store(wanted.redis_url, wanted.cell))


def read_store(url: str, cell: str) -> told.Store:
    """What a store tells; its address goes through the environment, where it is not listed. What goes wrong is its problem."""
    try:
        return measured(told.Store, ["router.doctor", "--cell", cell], STORE_LIMIT_S, {"TANDEM_REDIS_URL": url})
    except ChildFailed as error:
        return told.Store(str(error), {}, (), 0.0, 0.0, 0.0, 0.0, {})


CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python and packages", check_software),
    ("room for the model", check_room),
    ("limits, port, clocks", check_system),
    ("the engine (compiles its kernels the first time)", check_engine),
    ("transfers between processes", check_transfers),
    ("the request store", check_store),
)


def _model_bytes(wanted: Wanted) -> tuple[int, int, str, str]:
    """Weights and KV of one member, why they are not known, and the model in words."""
    try:
        ref = models.resolve(wanted.model)
        config = models.load_config(ref)
    except models.ModelError as error:
        return 0, 0, str(error), ""
    value_bytes = MIN_DTYPE_BYTES[wanted.dtype]
    weights = _parameters(ref) * value_bytes
    row = config.layers * 2 * config.kv_heads * config.head_dim * value_bytes
    kv = row * (-(-wanted.kv_tokens // PAGE_TOKENS) * PAGE_TOKENS)
    size = machine_judged.size
    words = (
        f"{ref.name} ({ref.format}): {size(weights)} of weights and {size(kv)} of KV for {wanted.kv_tokens} tokens in each member"
    )
    return weights, kv, "", words


def _parameters(ref: models.ModelRef) -> int:
    """Numbers in the model's files, about."""
    if ref.format == "gguf":
        total = 0
        for tensor in models.read_header(ref.path).tensors.values():
            count = 1
            for length in tensor.shape:
                count *= length
            total += count
        return total
    # 16 bits each is what nearly all of them are kept in.
    return sum(os.path.getsize(one) for one in Path(ref.path).glob("*.safetensors")) // 2

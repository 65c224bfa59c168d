"""What the measuring modules of other packages tell, by shape: the command line must not import what measures."""

import msgspec


class Engine(msgspec.Struct, frozen=True):
    """See engine.doctor.EngineFindings."""

    torch: str
    torch_threads: int
    instruction_sets: tuple[str, ...]
    instructions: str
    compiler: str
    compiler_problem: str
    backend: str
    refused: tuple[str, ...]
    check_s: float


class Transfer(msgspec.Struct, frozen=True):
    """See kv_transfer.doctor.TransferFindings."""

    transport: str
    net_devices: str
    problem: str
    connect_s: float
    writes: int
    write_s: float
    bytes_per_s: float


class Store(msgspec.Struct, frozen=True):
    """See router.doctor.StoreFindings."""

    problem: str
    info: dict[str, str]
    denied: tuple[str, ...]
    ping_p50_s: float
    ping_p99_s: float
    ahead_s: float
    ahead_doubt_s: float
    leases: dict[str, float]

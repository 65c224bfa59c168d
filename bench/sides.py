"""The systems that are compared. A side is up and idle until it is driven; nothing of it is shared with another one."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.doors import HttpDoor
from tandem_cli.cell import Cell, CellOptions
from tandem_cli.load.door import Door, grpc_door

#: Most tokens of one request on either side, prompt and answer together.
CONTEXT_TOKENS = 4096
#: KV of one member of ours, in tokens; a server of the peer gets a GiB, which is 46,000 tokens of the default model.
KV_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Side:
    """A running system. `processes`: the roots of everything that it runs. `settings`: what was set, for the record."""

    name: str
    open_door: Callable[[], AbstractAsyncContextManager[Door]]
    processes: tuple[int, ...]
    settings: dict[str, str] = field(default_factory=dict)


OURS_SPLIT = "Tandem 1P+1D"
OURS_TOGETHER = "Tandem aggregated, 2 threads"
PEER_SPLIT = "vLLM P/D over NIXL"
PEER_ONE_CORE = "vLLM aggregated, 1 core"
PEER_TOGETHER = "vLLM aggregated, 2 cores"
ALL = (OURS_SPLIT, OURS_TOGETHER, PEER_SPLIT, PEER_ONE_CORE, PEER_TOGETHER)


def our_options(name: str, model: Path, prefix_caching: bool) -> CellOptions:
    """The cell of one of our sides. `prefix_caching`: whether it keeps prefixes, as the peer does."""
    flag = "--prefix-cache" if prefix_caching else "--no-prefix-cache"
    split = name == OURS_SPLIT
    return CellOptions(
        model=str(model),
        prefill_members=1 if split else 0,
        threads=1 if split else 2,
        listen="127.0.0.1:0",
        log_level="warning",
        kv_tokens=KV_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        extra=(("prefill", flag), ("decode", flag)),
    )


def our_side(name: str, cell: Cell, options: CellOptions) -> Side:
    """A running cell as a side."""
    settings = {
        "members": f"{options.prefill_members} prefill, {options.decode_members} decode, {options.routers} router",
        "threads of each member": str(options.threads),
        "idle cores": "lent to the other members" if options.lend_cores else "kept",
        "dtype": options.dtype,
        "KV tokens of each member": str(options.kv_tokens),
        "context tokens": str(options.context_tokens),
        "flags": " ".join(options.flags_for("decode")),
        "transport": options.transport if options.prefill_members else "none",
    }
    return Side(name, lambda: grpc_door(cell.address), tuple(child.process.pid for child in cell.processes), settings)


def http_side(name: str, address: str, model: str, processes: tuple[int, ...], settings: dict[str, str]) -> Side:
    """Servers with an OpenAI-style door."""

    @asynccontextmanager
    async def door() -> AsyncIterator[Door]:
        yield HttpDoor(address, model)

    return Side(name, door, processes, settings)

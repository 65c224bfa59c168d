"""Settings that prefill and decode members share."""

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from engine.adapters import MAX_ADAPTERS
from kv_transfer.content import content_crc32
from kv_transfer.ports import Range
from models import DEFAULT_MODEL
from rpc.server_settings import ServerSettings
from rpc.settings import setting

#: Hosts that mean every address of this machine, which no peer can call.
_EVERY_HOST = ("0.0.0.0", "[::]", "")


class MemberSettings(ServerSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A pool member: its model, its memory, its engine and its transport."""

    model: Annotated[
        str, setting("Model to serve: a name, a folder, a GGUF file, or a hub id.", min_length=1, max_length=4096)
    ] = DEFAULT_MODEL
    dtype: Annotated[Literal["bfloat16", "float32"], setting("Type of weights and KV.")] = "bfloat16"
    weight_quantisation: Annotated[
        Literal["off", "int8"],
        setting("int8 keeps the matrices of linear layers so, with a scale for each output; the same for prefill and decode."),
    ] = "off"
    adapters: Annotated[
        tuple[str, ...],
        setting(
            "LoRA adapters that requests may name, each a folder as PEFT writes it; the same for prefill and decode.",
            form="name=folder",
            max_length=MAX_ADAPTERS,
        ),
    ] = ()
    adapter_max_rank: Annotated[int, setting("Greatest rank of an adapter's matrix.", ge=1, le=1024)] = 64
    adapter_max_bytes: Annotated[
        int, setting("Largest file of an adapter's weights.", "bytes", ge=1024, le=64 * 1024 * 1024 * 1024)
    ] = 1024 * 1024 * 1024
    backend: Annotated[str, setting("Engine backend.", min_length=1, max_length=64)] = "auto"
    threads: Annotated[int, setting("Threads of the engine's arithmetic; 0: one for each core.", ge=0, le=1024)] = 0
    core_share: Annotated[
        str,
        setting(
            "Folder in which members of one machine tell one another whether they have work; a step also uses the threads of "
            "those that have none. Unset: only its own.",
            max_length=4096,
        ),
    ] = ""
    context_tokens: Annotated[
        int, setting("Most tokens of prompt and output together; 0: the model's own limit.", "tokens", ge=0, le=100_000_000)
    ] = 0
    page_tokens: Annotated[int, setting("Length of a KV page.", "tokens", ge=1, le=1024)] = 16
    total_pages: Annotated[
        int, setting("KV pages of each group of layers, the null page included.", "pages", ge=2, le=100_000_000)
    ] = 4096
    window_pages: Annotated[
        int,
        setting(
            "The same for a group of layers that look back only so far; 0: what max_sequences hold at most, up to total_pages.",
            "pages",
            ge=0,
            le=100_000_000,
        ),
    ] = 0
    max_sequences: Annotated[int, setting("Most sequences that run at once.", ge=1, le=100_000)] = 64
    max_step_tokens: Annotated[int, setting("Most tokens in one step.", "tokens", ge=1, le=1_000_000)] = 512
    inbox_messages: Annotated[
        int, setting("Most messages that wait for the engine thread; more are refused.", ge=1, le=1_000_000)
    ] = 1024
    prefix_cache: Annotated[
        bool,
        setting("Keep full pages of prompts whose requests are over, for later ones that begin the same, while there is room."),
    ] = True
    transport: Annotated[
        Literal["tcp", "cma", "rdma", "memory"],
        setting("How KV pages travel: NIXL over TCP, over shared memory of one host or over RDMA, or within one process."),
    ] = "tcp"
    net_devices: Annotated[
        str, setting("Network devices that NIXL listens on, separated by commas; unset: UCX chooses.", max_length=1024)
    ] = ""
    transfer_ports: Annotated[
        str, setting("Lowest and highest TCP port of NIXL agents; unset: any.", form="low-high", pattern=r"^(\d{1,5}-\d{1,5})?$")
    ] = ""

    handover_checksums: Annotated[
        bool,
        setting("Send and check checksums of the KV that is handed over: slower, for tests and to find faults."),
    ] = False

    @property
    def content(self) -> Callable[[Sequence[Range]], int] | None:
        """What makes the checksums of content that are sent; None when none are."""
        return content_crc32 if self.handover_checksums else None

    @property
    def engine_threads(self) -> int:
        """Threads of the engine's arithmetic."""
        return self.threads or os.cpu_count() or 1

    metrics_aliases: Annotated[
        Literal["none", "vllm"], setting("Also show the four gauges that gateways read under another engine's names.")
    ] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_pages == 1:
            raise ValueError("window_pages is 1; the least is 2, as page 0 is never handed out, and 0 lets the member choose")
        low, _, high = self.transfer_ports.partition("-")
        if self.transfer_ports and not 0 < int(low) <= int(high) < 65_536:
            raise ValueError(f"transfer_ports is {self.transfer_ports}; it must be low-high with 1 <= low <= high <= 65535")
        host = self.listen.rpartition(":")[0]
        if host in _EVERY_HOST and not self.advertise:
            raise ValueError(f"advertise is required when listen is {self.listen}: peers need an address that they can call")

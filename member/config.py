"""Settings that prefill and decode members share."""

from typing import Annotated, Literal

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
    backend: Annotated[str, setting("Engine backend.", min_length=1, max_length=64)] = "auto"
    threads: Annotated[int, setting("Threads of the engine's arithmetic; 0: one for each core.", ge=0, le=1024)] = 0
    page_tokens: Annotated[int, setting("Length of a KV page.", "tokens", ge=1, le=1024)] = 16
    total_pages: Annotated[int, setting("KV pages in all, the null page included.", "pages", ge=2, le=100_000_000)] = 4096
    max_sequences: Annotated[int, setting("Most sequences that run at once.", ge=1, le=100_000)] = 64
    max_step_tokens: Annotated[int, setting("Most tokens in one step.", "tokens", ge=1, le=1_000_000)] = 512
    inbox_messages: Annotated[
        int, setting("Most messages that wait for the engine thread; more are refused.", ge=1, le=1_000_000)
    ] = 1024
    transport: Annotated[Literal["nixl", "memory"], setting("How KV pages travel; memory works within one process only.")] = (
        "nixl"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        host = self.listen.rpartition(":")[0]
        if host in _EVERY_HOST and not self.advertise:
            raise ValueError(f"advertise is required when listen is {self.listen}: peers need an address that they can call")

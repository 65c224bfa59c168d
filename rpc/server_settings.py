"""Settings that every process with a gRPC server has."""

from typing import Annotated, Literal

from rpc.channels import RECEIVE_MAX_BYTES
from rpc.security_settings import SecuritySettings
from rpc.settings import setting


class ServerSettings(SecuritySettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a process needs to be reached, watched and stopped."""

    name: Annotated[str, setting("Name of this process, kept over restarts; unset: its kind and address.", max_length=128)] = ""
    listen: Annotated[
        str,
        setting("Address of the gRPC server, host:port; port 0 takes a free one.", form="host:port", pattern=r"^\S+:\d{1,5}$"),
    ] = "127.0.0.1:0"
    advertise: Annotated[
        str, setting("How others reach it, host or host:port; unset: the address it listens on.", max_length=256)
    ] = ""
    metrics_port: (
        Annotated[int, setting("Port of the metrics, on the host of `listen`; 0 takes a free one, none is off.", ge=0, le=65535)]
        | None
    ) = 0
    reflection: Annotated[bool, setting("Offer server reflection.")] = False
    otlp_endpoint: Annotated[
        str, setting("Where traces go, host:port; unset: as OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere.")
    ] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting("Least severe lines that are logged.")] = "info"
    log_format: Annotated[Literal["json", "text"], setting("Form of log lines on stderr.")] = "json"
    drain_timeout_s: Annotated[
        float, setting("Budget for everything between a stop signal and the end.", "seconds", ge=0, le=3600)
    ] = 30.0
    drain_settle_s: Annotated[
        float, setting("Of it: new work is still taken that long after being not ready.", "seconds", ge=0, le=600)
    ] = 0.25
    stall_after_s: Annotated[
        float, setting("One turn of the scheduler that lasts longer means not alive.", "seconds", gt=0, le=3600)
    ] = 60.0
    receive_max_bytes: Annotated[
        int, setting("Most bytes of one received message.", "bytes", ge=64 * 1024, le=1024 * 1024 * 1024)
    ] = RECEIVE_MAX_BYTES
    ready_fd: Annotated[int, setting("File descriptor that gets one JSON line with the addresses when ready.", ge=3)] | None = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drain_settle_s > self.drain_timeout_s:
            raise ValueError(
                f"drain_settle_s is {self.drain_settle_s}; it must be at most drain_timeout_s, {self.drain_timeout_s}"
            )

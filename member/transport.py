"""The transport that a member's settings ask for."""

import sys

from kv_transfer.nixl import TransportSettings, prepare_environment
from member.config import MemberSettings
from rpc.application import ExitCode


def prepare_or_exit(settings: MemberSettings, prog: str) -> None:
    """As `prepare_transport`, for a process's start: a setting that does not fit is told on stderr and ends it with 2."""
    try:
        prepare_transport(settings)
    except TransportSettings as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(ExitCode.BAD_SETTINGS)


def prepare_transport(settings: MemberSettings) -> None:
    """Set what NIXL reads from the environment; to be called before any agent is made. Raises TransportSettings.

    The memory transport works within one process only, so a process of its own cannot use it.
    """
    if settings.transport == "memory":
        raise TransportSettings(
            "transport memory works within one process only; choose tcp, cma or rdma for a process of its own"
        )
    ports = None
    if settings.transfer_ports:
        low, _, high = settings.transfer_ports.partition("-")
        ports = (int(low), int(high))
    prepare_environment(settings.transport, settings.net_devices or None, ports)

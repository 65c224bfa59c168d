"""The transport that a member's settings ask for."""

from kv_transfer.nixl import prepare_environment
from member.config import MemberSettings


def prepare_transport(settings: MemberSettings) -> None:
    """Set what NIXL reads from the environment; to be called before any agent is made. Raises TransportSettings.

    The memory transport works within one process only, so a process of its own cannot use it.
    """
    if settings.transport == "memory":
        raise SystemExit("transport memory works within one process only; choose tcp or cma for a process of its own")
    ports = None
    if settings.transfer_ports:
        low, _, high = settings.transfer_ports.partition("-")
        ports = (int(low), int(high))
    prepare_environment(settings.transport, settings.net_devices or None, ports)

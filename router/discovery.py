"""Where members are: fixed addresses, or a DNS name that is asked again and again."""

import asyncio
import logging
import socket

_log = logging.getLogger(__name__)

#: Prefix of a target whose every address is a member, as in dns:///decode.tandem.svc.cluster.local:50061.
DNS_PREFIX = "dns:///"
#: Most members of one pool: each costs a channel and a watch.
ADDRESSES_MAX = 1024


class BadTarget(ValueError):
    """A target that is neither host:port nor dns:///host:port."""


def check_target(target: str) -> str:
    """`target` as it is. Raises BadTarget."""
    host, _, port = target.removeprefix(DNS_PREFIX).rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise BadTarget(f"{target!r} is neither host:port nor {DNS_PREFIX}host:port (port 1 to 65535)")
    return target


async def resolve(targets: tuple[str, ...], known: frozenset[str], timeout_s: float) -> frozenset[str]:
    """Addresses (host:port) of `targets` now.

    A name that cannot be resolved keeps what is `known`: a DNS server that is away must not empty a pool.
    """
    found: set[str] = set()
    for target in targets:
        if not target.startswith(DNS_PREFIX):
            found.add(target)
            continue
        host, _, port = target.removeprefix(DNS_PREFIX).rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            _log.warning("cannot resolve %s: %s; keeping the members known", host, error or "no answer in time")
            return frozenset(found | known)
        found |= {_address(family, sockaddr) for family, _, _, _, sockaddr in answers}
    if len(found) > ADDRESSES_MAX:
        _log.warning("%d addresses were found for %s; only %d are used", len(found), ", ".join(targets), ADDRESSES_MAX)
        return frozenset(sorted(found)[:ADDRESSES_MAX])
    return frozenset(found)


def _address(family: int, sockaddr: tuple[object, ...]) -> str:
    host, port = sockaddr[0], sockaddr[1]
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"

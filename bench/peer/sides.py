"""The peer's three ways to use two cores, as sides."""

import os
from collections.abc import Mapping

from bench.peer.servers import MODEL_NAME, Peer, Process, ServerOptions, arguments_of, free_port, pin, settings_of
from bench.sides import PEER_ONE_CORE, PEER_SPLIT, PEER_TOGETHER, Side, http_side


class TooFewCores(Exception):
    """This machine has fewer than two cores."""


def start_peers(peer: Peer, names: list[str], prefix_caching: bool) -> dict[str, Side]:
    """Start the sides with these names together; they are ready on return. Raises PeerFailed, TooFewCores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise TooFewCores("the comparison runs one member a core, and there is only one here")
    groups = {name: _options(name, cores, prefix_caching) for name in names}
    started = {name: [peer.start(one) for one in group] for name, group in groups.items()}
    peer.wait_ready([process for group in started.values() for process in group])
    sides = {}
    for name, group in started.items():
        for process, options in zip(group, groups[name], strict=True):
            pin(process.popen.pid, options.cores)
        sides[name] = _side(peer, name, group, groups[name])
    return sides


def _options(name: str, cores: list[int], prefix_caching: bool) -> list[ServerOptions]:
    if name == PEER_SPLIT:
        # A prefill server keeps no prefix: what it computed is given away.
        return [
            ServerOptions("peer-prefill", (cores[0],), free_port(), prefix_caching),
            ServerOptions("peer-decode", (cores[1],), free_port(), prefix_caching),
        ]
    if name == PEER_ONE_CORE:
        return [ServerOptions("peer-one-core", (cores[0],), 0, prefix_caching)]
    assert name == PEER_TOGETHER, name
    return [ServerOptions("peer-two-cores", tuple(cores), 0, prefix_caching)]


def _side(peer: Peer, name: str, servers: list[Process], options: list[ServerOptions]) -> Side:
    settings = {f"{one.name}, {key}": value for one in options for key, value in recorded(one).items()}
    if name != PEER_SPLIT:
        return http_side(name, servers[0].address, MODEL_NAME, (servers[0].popen.pid,), settings)
    proxy = peer.start_proxy(*servers)
    peer.wait_ready([proxy])
    return http_side(name, proxy.address, MODEL_NAME, tuple(one.popen.pid for one in (*servers, proxy)), settings)


def recorded(options: ServerOptions) -> Mapping[str, str]:
    """A server's settings as they are written down."""
    made = {key: value for key, value in settings_of(options).items() if key != "VLLM_NIXL_SIDE_CHANNEL_PORT"}
    return {**made, "arguments": " ".join(arguments_of(options)), "pinned to cores": ",".join(map(str, options.cores))}

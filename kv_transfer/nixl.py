"""Hand-over by NIXL. The only file that imports nixl, and only when an agent is made: the import takes about two seconds.

What shapes it (measured with NIXL 1.5.1 over UCX): nothing aborts a write that was posted, so a handle is kept until it is
terminal; errors are raised, never returned; a notice is sent by the writer's own poll; re-adding a live peer leaks descriptors.
"""

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_transfer.offer import Endpoint, HandoverError, Slab, endpoint_of
from kv_transfer.ports import (
    CAUSE_BAD_METADATA,
    CAUSE_CLOSED,
    CAUSE_CONNECT_FAILED,
    CAUSE_NOT_CONNECTED,
    CAUSE_NOT_REGISTERED,
    CAUSE_PEER_GONE,
    CAUSE_TRANSPORT,
    Push,
    PushResult,
    ReceiveFailed,
    SendFailed,
)
from rpc.incarnation import proven_dead

# Each receiving agent holds about 13 file descriptors and 4 MB.
WRITERS_MAX = 64
# Receiving agents that a sender knows. One that is gone without a push to it failing would be known for ever.
PEERS_MAX = 256
# The progress thread wakes on events; this is only its safety poll. NIXL's own value of 0 spins a core for ever.
PROGRESS_DELAY_US = 10_000

TLS_TCP = "tcp"
TLS_CMA = "cma"
TLS_RDMA = "rdma"
# rdma names no TCP beside it: a device that cannot be used shall fail the start, not slow everything down without a word.
_UCX_TLS = {TLS_TCP: "tcp", TLS_CMA: "tcp,cma", TLS_RDMA: "rc"}
_RDMA_DEVICES = Path("/sys/class/infiniband")
_REQUIRED = {"UCX_USE_MT_MUTEX": "y", "UCX_TCP_CONN_NB": "y"}
_DEFAULTS = {"UCX_TCP_USER_TIMEOUT": "10s", "NIXL_LOG_LEVEL": "WARN"}

_making_agent = threading.Lock()


class TransportSettings(HandoverError):
    """The process environment does not fit the transport. The message says what to change."""


def prepare_environment(tls: str = TLS_TCP, net_devices: str | None = None, port_range: tuple[int, int] | None = None) -> None:
    """Set what UCX and NIXL read from the environment. Call it in main(), before anything imports nixl.

    tls: "tcp" (fenced by destroying a receiving agent), "cma" (shared memory of one host) or "rdma" (InfiniBand or RoCE); the
    latter two are fenced only by the writer's death.
    net_devices: comma-separated devices to listen on. UCX does not authenticate, so name the pod network's ("lo" at home).
    port_range: lowest and highest TCP port, one for each agent. Raises TransportSettings.
    """
    if tls not in _UCX_TLS:
        raise TransportSettings(f"transport {tls!r} is not known: choose one of {', '.join(sorted(_UCX_TLS))}")
    if tls == TLS_RDMA and not any(_RDMA_DEVICES.glob("*")):
        raise TransportSettings(f"transport rdma needs an RDMA device and {_RDMA_DEVICES} shows none: choose tcp, or give one")
    wanted = {"UCX_TLS": _UCX_TLS[tls], **_REQUIRED}
    if net_devices is not None:
        _check_devices(net_devices)
        wanted["UCX_NET_DEVICES"] = net_devices
    if port_range is not None:
        low, high = port_range
        if not 1024 <= low <= high <= 65535:
            raise TransportSettings(f"port_range is {low}-{high}: give two ports from 1024 to 65535, the lower one first")
        wanted["UCX_TCP_PORT_RANGE"] = f"{low}-{high}"
    for name, value in wanted.items():
        found = os.environ.get(name, value)
        if found != value:
            raise TransportSettings(f"{name} is {found!r} in the environment and the settings need {value!r}: unset it")
    missing = [name for name in wanted if name not in os.environ]
    if missing and _nixl_loaded():
        raise TransportSettings(
            f"nixl was imported before {', '.join(missing)} was set: call prepare_environment first in main()"
        )
    os.environ.update(wanted)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def _check_devices(net_devices: str) -> None:
    known = sorted(path.name for kind in ("net", "infiniband") for path in Path("/sys/class", kind).glob("*"))
    for device in net_devices.split(","):
        if device.split(":")[0] not in known:
            raise TransportSettings(f"net_devices names {device!r}, which this machine lacks: choose from {', '.join(known)}")


def _nixl_loaded() -> bool:
    return any(name.startswith("nixl") and name.endswith("._bindings") for name in sys.modules)


def _check_environment() -> None:
    missing = [name for name in ("UCX_TLS", *_REQUIRED) if name not in os.environ]
    if missing:
        raise TransportSettings(f"{', '.join(missing)} is not set: call kv_transfer.nixl.prepare_environment first in main()")


class Agent:
    """One NIXL agent with its memory registered, and the errors that its calls raise."""

    def __init__(self, name: str, slabs: Sequence[Slab]) -> None:
        from nixl import _api as api

        self.name = name
        self.kinds = api.nixlBind
        self.errors = _errors_of(api)
        config = api.nixl_agent_config(
            enable_prog_thread=True, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        regions = [(slab.base_address, slab.size_bytes, 0, "") for slab in slabs]
        try:
            with _making_agent:
                self.agent = _with_progress_delay(api, name, config)
            self.agent.create_backend("UCX", {})
            self._registered = self.agent.register_memory(regions, "DRAM")
            self.metadata: bytes = self.agent.get_agent_metadata()
        except self.errors as error:
            checks = "check UCX_NET_DEVICES, UCX_TCP_PORT_RANGE (a port for each agent) and the limit of open files"
            raise TransportSettings(f"NIXL made no agent {name}: {type(error).__name__} {error}; {checks}") from error

    def cause_of(self, error: Exception, not_found: str) -> str:
        """Our label for an error of NIXL. not_found: what "not found" means for the call that raised it."""
        if isinstance(error, self.kinds.nixlRemoteDisconnectError):
            return CAUSE_PEER_GONE
        if isinstance(error, self.kinds.nixlNotFoundError):
            return not_found
        return CAUSE_TRANSPORT


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """Every error that a call may raise. They share no base below Exception."""
    named = (getattr(api.nixlBind, name) for name in dir(api.nixlBind) if name.startswith("nixl") and name.endswith("Error"))
    return (RuntimeError, *named)


def _with_progress_delay(api: Any, name: str, config: Any) -> Any:
    """The Python wrapper has no setting for the progress thread's delay, so the binding is wrapped while the agent is made."""
    made = api.nixlBind.nixlAgent

    def make(agent_name: str, settings: Any) -> Any:
        settings.pthrDelay = PROGRESS_DELAY_US
        return made(agent_name, settings)

    api.nixlBind.nixlAgent = make
    try:
        return api.nixl_agent(name, config)
    finally:
        api.nixlBind.nixlAgent = made


@dataclass(slots=True)
class _InFlight:
    agent: str
    handle: Any


class NixlSender:
    """One sending agent. `name` is unique to this incarnation. slabs: the writer's KV slabs and its logits rows.

    Beyond `peers_max` the receiving agent not connected to for longest is forgotten. Raises TransportSettings.
    """

    def __init__(self, name: str, slabs: Sequence[Slab], peers_max: int = PEERS_MAX) -> None:
        _check_environment()
        self._agent: Agent | None = Agent(f"{name}-{secrets.token_hex(4)}", slabs)
        self._in_flight: dict[int, _InFlight] = {}
        self._ended: list[PushResult] = []
        self._peers: dict[str, None] = {}  # in order of the last connect
        self._peers_max = peers_max
        self._gone: set[str] = set()

    @property
    def in_flight(self) -> int:
        """Pushes that were posted and whose end was not told yet."""
        return len(self._in_flight) + len(self._ended)

    @property
    def peers(self) -> int:
        """Receiving agents that are connected."""
        return len(self._peers)

    def connect(self, endpoint: Endpoint) -> None:
        """See Sender. The endpoint's checksum was checked when it was built: a damaged blob would poison the agent's name."""
        if endpoint.agent in self._peers:
            del self._peers[endpoint.agent]
            self._peers[endpoint.agent] = None
            return
        agent = self._open()
        try:
            added = agent.agent.add_remote_agent(endpoint.metadata)
        except (agent.kinds.nixlMismatchError, agent.kinds.nixlNotAllowedError) as error:
            raise SendFailed(CAUSE_BAD_METADATA, f"agent {endpoint.agent}: {error}") from error
        except agent.errors as error:
            raise SendFailed(CAUSE_CONNECT_FAILED, f"agent {endpoint.agent}: {error}") from error
        name = added.decode() if isinstance(added, bytes) else added
        if name != endpoint.agent:
            if name not in self._peers:
                agent.agent.remove_remote_agent(name)
            raise SendFailed(CAUSE_BAD_METADATA, f"the metadata is of agent {name} and the endpoint says {endpoint.agent}")
        self._peers[name] = None
        self._end_replaced(name)
        if len(self._peers) > self._peers_max:
            busy = {entry.agent for entry in self._in_flight.values()}
            self._gone.update([one for one in self._peers if one not in busy and one != name][:1])
            self._forget_gone(agent)

    def post(self, push: Push) -> None:
        """See Sender."""
        agent = self._open()
        if push.push_id in self._in_flight:
            raise ValueError(f"push {push.push_id} is in flight already")
        if push.agent in self._gone:
            raise SendFailed(CAUSE_PEER_GONE, f"agent {push.agent} is gone")
        if push.agent not in self._peers:
            raise SendFailed(CAUSE_NOT_CONNECTED, f"agent {push.agent} is not connected")
        # Ranges cost 3 to 7 us a transfer here and prepared lists 2: not worth a list per peer and slab.
        local = [(r.local_address, r.size_bytes, 0) for r in push.ranges]
        remote = [(r.remote_address, r.size_bytes, 0) for r in push.ranges]
        nixl = agent.agent
        try:
            ours, theirs = nixl.get_xfer_descs(local, "DRAM"), nixl.get_xfer_descs(remote, "DRAM")
            handle = nixl.initialize_xfer("WRITE", ours, theirs, push.agent, push.notice)
        except agent.errors as error:
            raise SendFailed(agent.cause_of(error, CAUSE_NOT_REGISTERED), f"push {push.push_id}: {error}") from error
        entry = self._in_flight[push.push_id] = _InFlight(push.agent, handle)
        try:
            done = nixl.transfer(handle, push.notice) == "DONE"
        except agent.errors as error:
            # It may have begun before it failed, so its end is told by poll like that of any other.
            self._end(push.push_id, entry, agent.cause_of(error, CAUSE_PEER_GONE), str(error))
            return
        if done:
            self._end(push.push_id, entry, "", "")

    def poll(self) -> list[PushResult]:
        """See Sender."""
        agent = self._open()
        for push_id, entry in list(self._in_flight.items()):
            try:
                if agent.agent.check_xfer_state(entry.handle) == "DONE":
                    self._end(push_id, entry, "", "")
            except agent.errors as error:
                self._end(push_id, entry, agent.cause_of(error, CAUSE_PEER_GONE), str(error))
        if self._gone:
            self._forget_gone(agent)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See Sender. Over TCP a write in flight is cut off with the agent; over CMA what was copied is copied."""
        self._in_flight.clear()
        self._peers.clear()
        self._agent = None

    def _open(self) -> Agent:
        if self._agent is None:
            raise SendFailed(CAUSE_CLOSED, "the sender is closed")
        return self._agent

    def _end_replaced(self, name: str) -> None:
        """A reader has one agent for a writer, and makes the next when it has destroyed the last: nothing that is in flight to an
        earlier one lands any more. UCX tells the end of most such writes; of one that was under way when its writer was stopped
        for eight seconds and fenced it told nothing in five minutes."""
        for push_id, entry in list(self._in_flight.items()):
            if _replaces(name, entry.agent):
                with contextlib.suppress(*self._open().errors):
                    self._end(push_id, entry, CAUSE_PEER_GONE, f"its agent was replaced by {name}")

    def _end(self, push_id: int, entry: _InFlight, cause: str, detail: str) -> None:
        entry.handle.release()
        del self._in_flight[push_id]
        if cause == CAUSE_PEER_GONE:
            self._gone.add(entry.agent)
        self._ended.append(PushResult(push_id, not cause, cause, detail))

    def _forget_gone(self, agent: Agent) -> None:
        """Give back the descriptors of dead peers, once nothing of theirs is in flight. Live peers are never removed."""
        busy = {entry.agent for entry in self._in_flight.values()}
        for name in self._gone - busy:
            # Not found means that NIXL forgot it already.
            with contextlib.suppress(*agent.errors):
                agent.agent.remove_remote_agent(name)
            self._gone.discard(name)
            self._peers.pop(name, None)


def _replaces(later: str, earlier: str) -> bool:
    """Whether a receiving agent is of the same reader as another one and was made after it, by their names."""
    (reader, number), (other, before) = (one.rsplit("-", 2)[:2] if one.count("-") > 1 else ("", "") for one in (later, earlier))
    return reader == other and number.isdecimal() and before.isdecimal() and int(before) < int(number)


class NixlReceiver:
    """One receiving agent per writer incarnation over the same slabs, so that one writer can be cut off alone.

    The slabs must stay mapped until the process ends: unmapping under a TCP write kills the process. Raises TransportSettings.
    """

    def __init__(self, name: str, slabs: Sequence[Slab], writers_max: int = WRITERS_MAX) -> None:
        _check_environment()
        self._name = name
        self._slabs = tuple(slabs)
        self._writers_max = writers_max
        self._destroying_fences = os.environ["UCX_TLS"] == _UCX_TLS[TLS_TCP]
        self._agents: dict[str, tuple[Agent, Endpoint]] = {}
        self._made = 0
        self._displaced: list[str] = []
        # Made and dropped: loading NIXL and UCX takes seconds, and bad settings shall fail the start, not the first offer.
        Agent(f"{name}-{secrets.token_hex(8)}", self._slabs)

    @property
    def writers(self) -> int:
        """Writer incarnations that have a receiving agent."""
        return len(self._agents)

    def endpoint(self, writer: str) -> Endpoint:
        """See Receiver. After a fence the next agent of that writer has another name: the old connection stays cut.

        At the bound the writer that was not asked about for longest is fenced: writers that left are never named again. One that
        still writes learns it by its pushes' failure, its grants by `take_displaced`.
        """
        found = self._agents.pop(writer, None)
        if found is not None:
            self._agents[writer] = found  # in order of the last request
            return found[1]
        if len(self._agents) >= self._writers_max:
            displaced = next((old for old in list(self._agents) if self.fence(old)), None)
            if displaced is None:
                raise ReceiveFailed(f"all {self._writers_max} receiving agents have living writers: raise writers_max")
            self._displaced.append(displaced)
        self._made += 1
        name = f"{self._name}-{self._made}-{secrets.token_hex(8)}"
        try:
            agent = Agent(name, self._slabs)
        except TransportSettings as error:
            raise ReceiveFailed(str(error)) from error
        endpoint = endpoint_of(name, agent.metadata, self._slabs)
        self._agents[writer] = (agent, endpoint)
        return endpoint

    def take_displaced(self) -> list[str]:
        """See Receiver."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def poll(self) -> list[tuple[str, bytes]]:
        """See Receiver."""
        arrived = []
        for writer, (agent, _) in self._agents.items():
            for notices in agent.agent.get_new_notifs().values():
                arrived += [(writer, notice) for notice in notices]
        return arrived

    def fence(self, writer: str) -> bool:
        """See Receiver. TCP: destroying the agent closes its connections. Else: only the writer's death, seen by this kernel."""
        if writer not in self._agents:
            return True
        if not self._destroying_fences and not proven_dead(writer):
            return False
        del self._agents[writer]
        return True

    def close(self) -> None:
        """See Receiver."""
        self._agents.clear()

"""The in-memory twin of NIXL: real copies inside one process, over the same ports, never kinder than NIXL.

Data moves whenever anybody polls, a little at a time, transfers overtake one another, and a notice leaves only from the writer's
own poll, after its data. A `MemoryFabric` is what the wire would be; tests make it slow, frozen, lossy or dead by its controls.
"""

import ctypes
import json
import random
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.offer import Endpoint, Slab, endpoint_of
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
    Range,
    ReceiveFailed,
    SendFailed,
)

STEP_BYTES = 1024 * 1024
NOTICES_MAX = 100_000
WRITERS_MAX = 64
PEERS_MAX = 256


@dataclass(slots=True)
class _Agent:
    """A receiving agent."""

    name: str
    slabs: tuple[Slab, ...]
    frozen: bool = False
    notices: deque[bytes] = field(default_factory=deque)


@dataclass(slots=True)
class _Transfer:
    push: Push
    sender: "MemorySender"
    done_bytes: int = 0
    cause: str = ""


class MemoryFabric:
    """Everything that the members of one process share instead of a network. Safe to use from many threads."""

    def __init__(self, seed: int = 0, step_bytes: int = STEP_BYTES) -> None:
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._step_bytes = step_bytes
        self._agents: dict[str, _Agent] = {}
        self._names: set[str] = set()
        self._transfers: list[_Transfer] = []
        self._failing: dict[str, int] = {}
        self._losing: dict[str, int] = {}

    # Controls.

    def set_speed(self, step_bytes: int) -> None:
        """Bytes that one transfer moves at one poll of anybody; 0 stops all data."""
        with self._lock:
            self._step_bytes = step_bytes

    def freeze(self, agent: str, frozen: bool = True) -> None:
        """Stop (or go on with) a receiving agent: transfers to it neither move nor fail, as with a stopped process over TCP."""
        with self._lock:
            self._agents[agent].frozen = frozen

    def kill(self, agent: str) -> None:
        """End a receiving agent as its process's death would: transfers to it fail, nothing more lands."""
        with self._lock:
            self._remove(agent)

    def fail_next(self, agent: str, count: int = 1) -> None:
        """The next transfers to an agent end with transport_error after half of their data."""
        with self._lock:
            self._failing[agent] = self._failing.get(agent, 0) + count

    def lose_next_notices(self, agent: str, count: int = 1) -> None:
        """The next notices for an agent never arrive, although their writer is told that all went well."""
        with self._lock:
            self._losing[agent] = self._losing.get(agent, 0) + count

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        with self._lock:
            return len(self._transfers)

    # Used by the two ends below.

    def add(self, name: str, slabs: tuple[Slab, ...]) -> _Agent:
        """Register a receiving agent. A name is never used twice."""
        with self._lock:
            if name in self._names:
                raise ReceiveFailed(f"agent name {name} was used before: names are never used again")
            self._names.add(name)
            agent = self._agents[name] = _Agent(name, slabs)
            return agent

    def slabs_of(self, name: str) -> tuple[Slab, ...] | None:
        """The registered memory of a living agent."""
        with self._lock:
            agent = self._agents.get(name)
            return agent.slabs if agent else None

    def begin(self, push: Push, sender: "MemorySender") -> None:
        """Put a transfer on its way. Raises SendFailed when the agent is gone."""
        with self._lock:
            if push.agent not in self._agents:
                raise SendFailed(CAUSE_PEER_GONE, f"agent {push.agent} is gone")
            self._transfers.append(_Transfer(push, sender))

    def end(self, name: str) -> None:
        """Destroy a receiving agent: this is the fence. Nothing lands after it returns."""
        with self._lock:
            self._remove(name)

    def take_notices(self, agent: _Agent) -> list[bytes]:
        """Notices of one agent since the last call; also moves data, as a progress thread would."""
        with self._lock:
            self._move()
            taken = [] if agent.frozen else list(agent.notices)
            if taken:
                agent.notices.clear()
            return taken

    def settle(self, sender: "MemorySender") -> list[PushResult]:
        """Move data, then end what is complete of one sender, in any order, and send its notices."""
        with self._lock:
            self._move()
            mine = [t for t in self._transfers if t.sender is sender and (t.cause or t.done_bytes >= t.push.size_bytes)]
            self._random.shuffle(mine)
            for one in mine:
                self._transfers.remove(one)
                if not one.cause:
                    self._notify(one.push)
            return [PushResult(t.push.push_id, not t.cause, t.cause, "in-memory transport" if t.cause else "") for t in mine]

    def abandon(self, sender: "MemorySender") -> None:
        """The sender's agent is destroyed: what has not landed never will."""
        with self._lock:
            self._transfers = [t for t in self._transfers if t.sender is not sender]

    def _remove(self, name: str) -> None:
        self._agents.pop(name, None)
        for one in self._transfers:
            if one.push.agent == name:
                one.cause = CAUSE_PEER_GONE

    def _notify(self, push: Push) -> None:
        agent = self._agents[push.agent]
        if self._losing.get(push.agent, 0) > 0:
            self._losing[push.agent] -= 1
            return
        if len(agent.notices) >= NOTICES_MAX:
            raise RuntimeError(f"{NOTICES_MAX} notices wait at agent {push.agent}: its receiver is not polled")
        agent.notices.append(push.notice)

    def _move(self) -> None:
        order = list(self._transfers)
        self._random.shuffle(order)
        for one in order:
            agent = self._agents.get(one.push.agent)
            if one.cause or one.sender.frozen or agent is None or agent.frozen:
                continue
            one.done_bytes += _copy(one.push.ranges, one.done_bytes, self._step_bytes)
            if self._failing.get(agent.name, 0) > 0 and 2 * one.done_bytes >= one.push.size_bytes:
                self._failing[agent.name] -= 1
                one.cause = CAUSE_TRANSPORT


class MemorySender:
    """One sending agent on a fabric. See Sender."""

    def __init__(self, fabric: MemoryFabric, name: str, slabs: Sequence[Slab], peers_max: int = PEERS_MAX) -> None:
        self._fabric = fabric
        self.name = f"{name}-{secrets.token_hex(4)}"
        self._slabs = tuple(slabs)
        self._peers: dict[str, tuple[Slab, ...]] = {}
        self._peers_max = peers_max
        self._in_flight: set[int] = set()
        self._closed = False
        # A test's control: a stopped writer moves nothing and learns nothing until it goes on.
        self.frozen = False

    @property
    def in_flight(self) -> int:
        """Pushes whose end was not told yet."""
        return len(self._in_flight)

    @property
    def peers(self) -> int:
        """Receiving agents that are connected."""
        return len(self._peers)

    def connect(self, endpoint: Endpoint) -> None:
        """See Sender."""
        self._check_open()
        if endpoint.agent in self._peers:
            self._peers[endpoint.agent] = self._peers.pop(endpoint.agent)
            return
        name, slabs = _read_metadata(endpoint.metadata)
        if name != endpoint.agent:
            raise SendFailed(CAUSE_BAD_METADATA, f"the metadata is of agent {name} and the endpoint says {endpoint.agent}")
        if self._fabric.slabs_of(name) is None:
            raise SendFailed(CAUSE_CONNECT_FAILED, f"agent {name} is gone")
        self._peers[name] = slabs
        if len(self._peers) > self._peers_max:
            self._peers.pop(next(iter(self._peers)))

    def post(self, push: Push) -> None:
        """See Sender."""
        self._check_open()
        if push.push_id in self._in_flight:
            raise ValueError(f"push {push.push_id} is in flight already")
        theirs = self._peers.get(push.agent)
        if theirs is None:
            raise SendFailed(CAUSE_NOT_CONNECTED, f"agent {push.agent} is not connected")
        for one in push.ranges:
            if not (
                _registered(self._slabs, one.local_address, one.size_bytes)
                and _registered(theirs, one.remote_address, one.size_bytes)
            ):
                raise SendFailed(CAUSE_NOT_REGISTERED, f"push {push.push_id}: {one} is outside the registered memory")
        self._fabric.begin(push, self)
        self._in_flight.add(push.push_id)

    def poll(self) -> list[PushResult]:
        """See Sender."""
        self._check_open()
        if self.frozen:
            return []
        results = self._fabric.settle(self)
        self._in_flight -= {r.push_id for r in results}
        return results

    def close(self) -> None:
        """See Sender."""
        self._closed = True
        self._in_flight.clear()
        self._fabric.abandon(self)

    def _check_open(self) -> None:
        if self._closed:
            raise SendFailed(CAUSE_CLOSED, "the sender is closed")


class MemoryReceiver:
    """One receiving agent per writer incarnation on a fabric. See Receiver."""

    def __init__(self, fabric: MemoryFabric, name: str, slabs: Sequence[Slab], writers_max: int = WRITERS_MAX) -> None:
        self._fabric = fabric
        self._name = name
        self._slabs = tuple(slabs)
        self._writers_max = writers_max
        self._agents: dict[str, tuple[_Agent, Endpoint]] = {}
        self._displaced: list[str] = []

    @property
    def writers(self) -> int:
        """Writer incarnations that have a receiving agent."""
        return len(self._agents)

    def endpoint(self, writer: str) -> Endpoint:
        """See Receiver."""
        found = self._agents.pop(writer, None)
        if found is not None:
            self._agents[writer] = found  # in order of the last request
            return found[1]
        if len(self._agents) >= self._writers_max:
            oldest = next(iter(self._agents))
            self.fence(oldest)
            self._displaced.append(oldest)
        name = f"{self._name}-{secrets.token_hex(8)}"
        agent = self._fabric.add(name, self._slabs)
        endpoint = endpoint_of(name, _write_metadata(name, self._slabs), self._slabs)
        self._agents[writer] = (agent, endpoint)
        return endpoint

    def take_displaced(self) -> list[str]:
        """See Receiver."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def poll(self) -> list[tuple[str, bytes]]:
        """See Receiver."""
        return [(writer, notice) for writer, (agent, _) in self._agents.items() for notice in self._fabric.take_notices(agent)]

    def fence(self, writer: str) -> bool:
        """See Receiver."""
        found = self._agents.pop(writer, None)
        if found is not None:
            self._fabric.end(found[0].name)
        return True

    def close(self) -> None:
        """See Receiver."""
        for writer in list(self._agents):
            self.fence(writer)


def _copy(ranges: Sequence[Range], start: int, limit: int) -> int:
    """Copy up to `limit` bytes of the concatenated ranges from byte `start` on; returns the bytes copied."""
    copied, offset = 0, 0
    for one in ranges:
        skip = max(0, start + copied - offset)
        size = min(one.size_bytes - skip, limit - copied)
        if size > 0:
            ctypes.memmove(one.remote_address + skip, one.local_address + skip, size)
            copied += size
        offset += one.size_bytes
    return copied


def _registered(slabs: Sequence[Slab], address: int, size_bytes: int) -> bool:
    return any(s.base_address <= address and address + size_bytes <= s.base_address + s.size_bytes for s in slabs)


def _write_metadata(name: str, slabs: Sequence[Slab]) -> bytes:
    return json.dumps([name, [[s.base_address, s.size_bytes, s.unit_bytes] for s in slabs]]).encode()


def _read_metadata(data: bytes) -> tuple[str, tuple[Slab, ...]]:
    try:
        name, slabs = json.loads(data)
        return str(name), tuple(Slab(*s) for s in slabs)
    except (ValueError, TypeError) as error:
        raise SendFailed(CAUSE_BAD_METADATA, "not the metadata of an in-memory agent") from error

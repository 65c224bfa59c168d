"""The two ends of a transport. Both are owned by one transfer thread each and are called on it only."""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.offer import Endpoint, HandoverError

# Closed labels of why a push, or the connection it needs, failed.
CAUSE_PEER_GONE = "peer_gone"
CAUSE_NOT_REGISTERED = "not_registered"
CAUSE_NOT_CONNECTED = "not_connected"
CAUSE_BAD_METADATA = "bad_metadata"
CAUSE_CONNECT_FAILED = "connect_failed"
CAUSE_TRANSPORT = "transport_error"
CAUSE_CLOSED = "closed"
# These two come from the pump: dropped on request, or too old when its turn came. Nothing of such a push was written.
CAUSE_WITHDRAWN = "withdrawn"
CAUSE_STALE = "stale"
CAUSES = (
    CAUSE_PEER_GONE,
    CAUSE_NOT_REGISTERED,
    CAUSE_NOT_CONNECTED,
    CAUSE_BAD_METADATA,
    CAUSE_CONNECT_FAILED,
    CAUSE_TRANSPORT,
    CAUSE_CLOSED,
    CAUSE_WITHDRAWN,
    CAUSE_STALE,
)


class SendFailed(HandoverError):
    """A connection or a post that did not happen. `cause` is one of CAUSES, `detail` is for people."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


class ReceiveFailed(HandoverError):
    """A receiving agent could not be made. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Range:
    """One contiguous copy: from an address of this process to an address of the peer, in bytes."""

    local_address: int
    remote_address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Push:
    """One transfer: ranges to write into the memory of `agent`, and the notice to give the peer once all of them are written.

    push_id: chosen by the caller, unique among its pushes that are not yet answered.
    """

    push_id: int
    agent: str
    ranges: tuple[Range, ...]
    notice: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(r.size_bytes for r in self.ranges)


@dataclass(frozen=True, slots=True)
class PushResult:
    """The end of one push: no byte of it is read or written after this. `cause` is one of CAUSES, empty when ok."""

    push_id: int
    ok: bool
    cause: str = ""
    detail: str = ""


class Sender(Protocol):
    """Writes into memory that peers registered."""

    def connect(self, endpoint: Endpoint) -> None:
        """Learn a peer's memory. Does nothing the second time. May block up to the connect time-out. Raises SendFailed."""

    def post(self, push: Push) -> None:
        """Begin a write. Raises SendFailed when it did not begin: then poll never reports it and nothing was written."""

    def poll(self) -> list[PushResult]:
        """Carry writes on and tell which have ended. Never raises for a push that failed. Must be called until all have ended:
        a notice is only sent from here."""

    @property
    def in_flight(self) -> int:
        """Pushes that were posted and whose end was not told yet."""

    @property
    def peers(self) -> int:
        """Receiving agents that are connected."""

    def close(self) -> None:
        """Give the agent back. What is in flight is aborted where the transport can; call it after the last result."""


class Receiver(Protocol):
    """Memory that peers may write into, with one receiving agent per writer incarnation."""

    def endpoint(self, writer: str) -> Endpoint:
        """The endpoint for one writer incarnation; makes its agent on first use (tens of milliseconds).

        When all agents are in use, that of the writer that was not asked about for longest is fenced; see `take_displaced`.
        Raises ReceiveFailed.
        """

    def take_displaced(self) -> list[str]:
        """Writers that were fenced to make room for others since the last call."""

    def poll(self) -> list[tuple[str, bytes]]:
        """Notices that arrived since the last call: (writer incarnation whose agent received it, notice bytes)."""

    def fence(self, writer: str) -> bool:
        """Cut one writer incarnation off. True: no write of it can land any more. False: this transport cannot prove it now
        (shared memory while the writer lives); ask again later. A writer that never had an endpoint is fenced already."""

    @property
    def writers(self) -> int:
        """Writer incarnations that have a receiving agent."""

    def close(self) -> None:
        """Give all agents back."""

"""The waiting room of a router: bounded, by priority, fair between tenants, oldest first. Pure.

Inside a priority the tenant that was served least goes first (in tokens); inside a tenant the oldest request. A request that
does not fit may be passed by others behind it, but only a bounded number of times.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue."""

    max_requests: int = 1024
    max_tokens: int = 4_194_304
    """Prompt tokens of everything waiting."""
    max_tenant_requests: int = 1024
    max_passes: int = 8
    """How many requests may go before one that stood in front of them and did not fit."""
    lookahead: int = 16
    """How many waiting requests one `take` looks at."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `tokens` is what it costs its tenant (prompt tokens); times are monotonic seconds."""

    request_id: str
    tenant: str
    priority: int
    tokens: int
    arrived_at: float
    expires_at: float | None = None


class QueueFull(Exception):
    """There is no room: `limit` names the bound (a field of QueueLimits), `bound` is its value."""

    def __init__(self, limit: str, bound: int) -> None:
        super().__init__(f"the queue is full: {limit} is {bound}")
        self.limit = limit
        self.bound = bound


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """What waits now, and what happened since the start."""

    requests: int
    tokens: int
    by_priority: dict[int, int]
    oldest_arrived_at: dict[int, float]
    tenants: int
    put: int
    taken: int
    removed: int
    requeued: int
    expired: int
    refused: int
    passes: int


class WaitingQueue:
    """See the module."""

    def __init__(self, limits: QueueLimits) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, request_id: str) -> bool:
        raise NotImplementedError

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of everything waiting."""
        raise NotImplementedError

    def put(self, waiting: Waiting) -> None:
        """Add a new request. Raises QueueFull, or ValueError when the id waits already."""
        raise NotImplementedError

    def requeue(self, waiting: Waiting) -> None:
        """Put a request back that was taken and refused by a member: its age counts from its arrival, bounds do not apply."""
        raise NotImplementedError

    def take(self, fits: Callable[[Waiting], bool]) -> Waiting | None:
        """Remove and return the first request, in order, for which `fits` answers True; None when there is none to go."""
        raise NotImplementedError

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out (cancelled while queued); None when it is not here: it was taken a moment ago, or never came."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Waiting]:
        """Remove and return what has waited past its `expires_at`, earliest first."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """When `expire` can next return something; None when nothing expires."""
        raise NotImplementedError

    def statistics(self) -> QueueStatistics:
        """Counts for metrics."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Recount; sentences about what does not add up, empty when all does."""
        raise NotImplementedError

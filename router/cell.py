"""What every request of this router uses."""

from dataclasses import dataclass, field

from lifecycle.deadlines import Deadlines
from router.admission import Admission
from router.keeping import UnansweredCreates, UnwrittenEnds
from router.request import ValidatedRequest
from router.seat import SeatLimits
from router.store import Store
from telemetry.router_metrics import RouterMetrics
from telemetry.tracing import OpenSpan, Tracing


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Bounds of one request's way. Durations in seconds, sizes in bytes."""

    max_attempts: int = 3
    buffer_bytes: int = 65_536
    send_timeout_s: float = 10.0
    seat: SeatLimits = field(default_factory=SeatLimits)


@dataclass(slots=True)
class RetryBudget:
    """Bounds retries over all requests: each request allows `share` of one more, at most `most` are saved up."""

    share: float = 0.2
    most: float = 20.0
    saved: float = 20.0

    def request(self) -> None:
        """A new request came."""
        self.saved = min(self.most, self.saved + self.share)

    def take(self) -> bool:
        """Whether one more retry is allowed; it is counted."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class Cell:
    """The parts that requests share."""

    store: Store
    admission: Admission
    unwritten: UnwrittenEnds
    unanswered: UnansweredCreates
    retries: RetryBudget
    limits: RouteLimits
    metrics: RouterMetrics
    tracing: Tracing


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the door. `rpc_bound`: the overall limit is the RPC's own deadline."""

    request: ValidatedRequest
    deadlines: Deadlines
    rpc_bound: bool
    span: OpenSpan

"""What every request of this router uses."""

import math
from dataclasses import dataclass, field

from lifecycle.deadlines import Deadlines
from router.admission import Admission
from router.budget import Limits, LimitsOf
from router.keeping import AcceptedCancels, UnansweredCreates, UnwrittenEnds
from router.recent_ends import RecentEnds
from router.request import ValidatedRequest
from router.seat import SeatLimits
from router.store import Store
from router.stream_log import LogBounds
from router.tenant_limits import TenantLimits
from router.without_store import Outage
from telemetry.router_metrics import RouterMetrics
from telemetry.tracing import OpenSpan, Tracing


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Bounds of one request's way. Durations in seconds, sizes in bytes."""

    max_attempts: int = 3
    log: LogBounds = field(default_factory=LogBounds)
    failover_wait_s: float = 15.0
    send_timeout_s: float = 10.0
    most_readers: int = 8
    seat: SeatLimits = field(default_factory=SeatLimits)


@dataclass(slots=True)
class RetryBudget:
    """Bounds retries over all requests: each request allows `share` of one more, at most `most` are saved up."""

    share: float = 0.2
    most: float = 256.0
    saved: float = math.inf

    def __post_init__(self) -> None:
        self.saved = min(self.saved, self.most)

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
    cancels: AcceptedCancels
    retries: RetryBudget
    limits: RouteLimits
    metrics: RouterMetrics
    tracing: Tracing
    outage: Outage = Outage.REFUSE
    ends: RecentEnds = field(default_factory=RecentEnds)
    tenants: TenantLimits = field(default_factory=TenantLimits)
    budgets: LimitsOf = field(default=lambda tenant: Limits())


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the door. `rpc_bound`: the overall limit is the RPC's own deadline. `returned`: its client says that it tried
    before."""

    request: ValidatedRequest
    deadlines: Deadlines
    rpc_bound: bool
    span: OpenSpan
    returned: bool = False

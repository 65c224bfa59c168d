"""What a cell looks like at one moment, as values. Names, numbers and states only, never text. Pure.

proto/tandem/v1/cell.proto says what each field means; `router.cell_picture` makes them, `router.cell_messages` tells them.
"""

from dataclasses import dataclass, replace
from enum import Enum

from lifecycle.finish import Ending
from lifecycle.pages_by_state import NO_PAGES, PagesByState
from lifecycle.states import State
from lifecycle.usage import Timings, Usage
from router.budget import Budget


class MemberState(Enum):
    """Whether work can go to a member."""

    READY = "ready"
    DRAINING = "draining"
    STALE = "stale"
    LOST = "lost"
    UNREACHED = "unreached"
    UNFIT = "unfit"


class Stage(Enum):
    """What a request waits for, or what is done for it."""

    QUEUE = "queue"
    SEAT = "seat"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    HANDOVER = "handover"
    DECODE = "decode"
    READER = "reader"
    SEND = "send"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class RouterView:
    """A router whose lease holds."""

    name: str
    address: str
    lease_left_s: float
    tells: bool


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as its last news say. Rates are of the last seconds."""

    state: MemberState
    name: str = ""
    incarnation: str = ""
    address: str = ""
    reason: str = ""
    news_age_s: float = 0.0
    running_sequences: int = 0
    paused_sequences: int = 0
    waiting_sequences: int = 0
    preempted_sequences: int = 0
    max_sequences: int = 0
    waiting_tokens: int = 0
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    pages: PagesByState = NO_PAGES
    page_tokens: int = 0
    computes_prompts: bool = False
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool; members by name."""

    role: str
    members: tuple[MemberView, ...]


@dataclass(frozen=True, slots=True)
class QueueLane:
    """One priority of the queue; `oldest_s` in seconds."""

    priority: int
    requests: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class QueueView:
    """What waits; lanes by priority, highest first."""

    requests: int
    tokens: int
    max_requests: int
    tenants: int
    lanes: tuple[QueueLane, ...]


@dataclass(frozen=True, slots=True)
class BudgetView:
    """Units held of a budget."""

    budget: Budget
    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that has not ended. `computed_prompt_tokens`: as far as is told."""

    request_id: str
    tenant: str
    adapter: str
    state: State
    stage: Stage
    attempt: int
    priority: int
    age_s: float
    in_state_s: float
    prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    choices: int
    prefill_member: str
    decode_member: str
    readers: int
    unsent_bytes: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, at wall time `at` in seconds. `usage` None: nobody knows it."""

    request_id: str
    tenant: str
    adapter: str
    state: State
    ending: Ending
    at: float
    attempts: int
    priority: int
    prefill_member: str
    decode_member: str
    usage: Usage | None
    timings: Timings


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell at wall time `at` in seconds, as one router sees it."""

    at: float
    router: str
    model: str
    model_snapshot: str
    context_tokens: int
    store_available: bool
    draining: bool
    routers: tuple[RouterView, ...]
    pools: tuple[PoolView, ...]
    queue: QueueView
    budgets: tuple[BudgetView, ...]
    running_requests: int
    requests: tuple[LiveRequest, ...]
    ended_requests: int
    ended: tuple[EndedRequest, ...]

    def cut(self, max_requests: int, max_ended: int) -> "CellView":
        """The same with at most so many requests listed."""
        return replace(self, requests=self.requests[:max_requests], ended=self.ended[:max_ended])

    def of_tenant(self, tenant: str) -> "CellView":
        """The same without what is not the tenant's: requests and budgets of others, and where processes are."""
        requests = tuple(one for one in self.requests if one.tenant == tenant)
        ended = tuple(one for one in self.ended if one.tenant == tenant)
        budgets = tuple(one for one in self.budgets if one.budget.scope.value != "tenant" or one.budget.name == tenant)
        pools = tuple(
            PoolView(pool.role, tuple(replace(one, address="", incarnation="", reason="") for one in pool.members))
            for pool in self.pools
        )
        return replace(
            self,
            routers=tuple(replace(one, address="") for one in self.routers),
            pools=pools,
            requests=requests,
            running_requests=len(requests),
            ended=ended,
            ended_requests=len(ended),
            budgets=budgets,
        )

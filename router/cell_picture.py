"""Makes a CellView of what a router knows. Pure: times come in, and everything is read, nothing kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lifecycle.record import RequestRecord
from lifecycle.states import State
from router.budget import Budget, LimitsOf, Resource, Scope
from router.cell_view import (
    BudgetView,
    CellView,
    EndedRequest,
    LiveRequest,
    MemberState,
    MemberView,
    PoolView,
    QueueLane,
    QueueView,
    RouterView,
    Stage,
)
from router.member_facts import MemberInfo, MemberLoad, Role
from router.progress import Progress
from router.queue import QueueStatistics
from router.rates import Rate
from router.request import ServedModel, ValidatedRequest
from router.store_totals import StoreTotals

#: Tenants whose budgets are shown at most.
MAX_TENANTS = 64
#: Running requests that are listed at most.
MAX_LISTED = 1000


@dataclass(frozen=True, slots=True)
class KnownMember:
    """One address of a pool. `info` None: it was never reached. `lost` and `unfit`: why; empty when it is not."""

    role: Role
    address: str
    info: MemberInfo | None = None
    load: MemberLoad = field(default_factory=MemberLoad)
    news_age_s: float = 0.0
    stale: bool = False
    lost: str = ""
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """One request of this router, as its parts stand now. `paused`: it waits for its reader."""

    request: ValidatedRequest
    record: RequestRecord
    progress: Progress
    readers: int
    unsent_bytes: int
    send_s: float
    paused: bool


@dataclass(frozen=True, slots=True)
class Known:
    """What a router knows. `now` is monotonic, `wall` since the epoch, in seconds; `held`: units by label of this router's own
    tickets; `totals` None: the store does not answer; `rates` by address."""

    now: float
    wall: float
    router: str
    address: str
    model: ServedModel
    context_tokens: int
    draining: bool
    has_prefill_pool: bool
    members: Sequence[KnownMember]
    rates: Mapping[str, Rate]
    queue: QueueStatistics
    max_queue: int
    limits: LimitsOf
    held: Mapping[str, int]
    totals: StoreTotals | None
    requests: Sequence[KnownRequest]
    running_requests: int
    ended: Sequence[EndedRequest]
    ended_requests: int


def picture(known: Known) -> CellView:
    """The view."""
    return CellView(
        at=known.wall,
        router=known.router,
        model=known.model.name,
        model_snapshot=known.model.snapshot,
        context_tokens=known.context_tokens,
        store_available=known.totals is not None,
        draining=known.draining,
        routers=_routers(known),
        pools=_pools(known),
        queue=_queue(known),
        budgets=_budgets(known),
        running_requests=known.running_requests,
        requests=tuple(live_request(one, known.now, known.wall) for one in known.requests[:MAX_LISTED]),
        ended_requests=known.ended_requests,
        ended=tuple(known.ended),
    )


def budgets_of(members: Iterable[KnownMember], tenants: Iterable[str], limits: LimitsOf) -> list[tuple[Budget, int]]:
    """The budgets that are shown, each with its limit: of members, of the cell, of tenants."""
    shown: list[tuple[Budget, int]] = []
    for one in members:
        if one.info is None or one.lost or one.unfit:
            continue
        if one.role is Role.DECODE:
            shown.append((Budget(Resource.PAGES, Scope.MEMBER, one.info.name), one.info.total_pages))
        else:
            shown.append((Budget(Resource.TOKENS, Scope.MEMBER, one.info.name), one.info.max_queued_tokens))
    common = limits("")
    totals = [
        (Budget(Resource.TOKENS, Scope.TOTAL), common.total_tokens),
        (Budget(Resource.PAGES, Scope.TOTAL), common.total_pages),
    ]
    for tenant in sorted(set(tenants))[:MAX_TENANTS]:
        own = limits(tenant)
        totals.append((Budget(Resource.TOKENS, Scope.TENANT, tenant), own.tenant_tokens))
        totals.append((Budget(Resource.PAGES, Scope.TENANT, tenant), own.tenant_pages))
    shown += [(budget, limit) for budget, limit in totals if limit is not None]
    return sorted(dict(shown).items(), key=lambda one: (one[0].scope.value, one[0].resource.value, one[0].name))


def live_request(one: KnownRequest, now: float, wall: float) -> LiveRequest:
    """A request that runs."""
    request, record, progress = one.request, one.record, one.progress
    usage = progress.usage()
    return LiveRequest(
        request_id=record.request_id,
        tenant=record.tenant,
        adapter=record.adapter,
        state=record.state,
        stage=_stage(one),
        attempt=record.attempt,
        priority=record.priority,
        age_s=max(0.0, now - progress.arrived_at),
        in_state_s=max(0.0, wall - record.transitions[-1].at),
        prompt_tokens=progress.prompt_tokens,
        computed_prompt_tokens=_computed(progress),
        cached_prompt_tokens=usage.cached_prompt_tokens,
        output_tokens=progress.selected_tokens,
        max_output_tokens=request.max_output_tokens,
        choices=request.choices.made,
        prefill_member=record.prefill_member,
        decode_member=record.decode_member,
        readers=one.readers,
        unsent_bytes=one.unsent_bytes,
        timings=progress.timings(now, one.send_s),
    )


def _computed(progress: Progress) -> int:
    """Prompt tokens that are computed, as far as is told."""
    if progress.committed is not None:
        return progress.prompt_tokens
    return min(progress.prompt_tokens, progress.prefilling.computed_tokens) if progress.prefilling is not None else 0


_STAGES = {
    State.CREATED: Stage.QUEUE,
    State.QUEUED: Stage.QUEUE,
    State.ADMITTED: Stage.SEAT,
    State.DRAINING: Stage.SEND,
}


def _stage(one: KnownRequest) -> Stage:
    state, progress = one.record.state, one.progress
    if state in _STAGES:
        return _STAGES[state]
    if state is State.PREFILLING:
        if progress.prefilling is None:  # the decode member computes it and tells nothing in between
            return Stage.PREFILL
        computed = progress.prefilling.computed_tokens
        if not computed:
            return Stage.PREFILL_QUEUE
        return Stage.PREFILL if computed < progress.prompt_tokens else Stage.HANDOVER
    if state is State.DECODING:
        return Stage.READER if one.paused else Stage.DECODE
    return Stage.CANCEL


def _routers(known: Known) -> tuple[RouterView, ...]:
    if known.totals is None:
        return (RouterView(known.router, known.address, 0.0, tells=True),)
    living = [
        RouterView(name, lease.address, lease.left_s, tells=name == known.router)
        for name, lease in known.totals.routers.items()
        if lease.left_s > 0
    ]
    return tuple(sorted(living, key=lambda one: one.name))


def _pools(known: Known) -> tuple[PoolView, ...]:
    roles = [Role.PREFILL] * known.has_prefill_pool + [Role.DECODE]
    return tuple(
        PoolView(
            role.value,
            tuple(
                sorted(
                    (_member(one, known.rates.get(one.address, Rate())) for one in known.members if one.role is role),
                    key=lambda member: (member.name, member.address),
                )
            ),
        )
        for role in roles
    )


def _member(one: KnownMember, rate: Rate) -> MemberView:
    state, info, load = _member_state(one), one.info, one.load
    if info is None:
        return MemberView(state, address=one.address)
    return MemberView(
        state=state,
        name=info.name,
        incarnation=info.incarnation,
        address=one.address,
        reason=one.lost or one.unfit,
        news_age_s=one.news_age_s,
        running_sequences=load.running_sequences,
        paused_sequences=load.paused_sequences,
        waiting_sequences=load.waiting_sequences,
        preempted_sequences=load.preempted_sequences,
        max_sequences=info.max_sequences,
        waiting_tokens=load.waiting_tokens,
        steps_per_s=rate.steps,
        tokens_per_s=rate.tokens,
        step_s=load.decode_step_s,
        pages=load.pages,
        page_tokens=info.page_tokens,
        computes_prompts=info.computes_prompts,
        adapters=tuple(sorted(each.name for each in info.adapters)),
    )


def _member_state(one: KnownMember) -> MemberState:
    if one.info is None:
        return MemberState.UNREACHED
    if one.lost:
        return MemberState.LOST
    if one.stale:
        return MemberState.STALE
    if one.unfit:
        return MemberState.UNFIT
    return MemberState.DRAINING if one.load.draining else MemberState.READY


def _queue(known: Known) -> QueueView:
    queue = known.queue
    lanes = tuple(
        QueueLane(priority, requests, max(0.0, known.now - queue.oldest_arrived_at[priority]))
        for priority, requests in sorted(queue.by_priority.items(), reverse=True)
    )
    return QueueView(queue.requests, queue.tokens, known.max_queue, queue.tenants, lanes)


def _budgets(known: Known) -> tuple[BudgetView, ...]:
    held = known.held if known.totals is None else known.totals.reserved
    tenants = (one.record.tenant for one in known.requests)
    return tuple(
        BudgetView(budget, held.get(budget.label, 0), limit) for budget, limit in budgets_of(known.members, tenants, known.limits)
    )

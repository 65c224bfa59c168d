"""A CellView as clients read it."""

from typing import Any

from router.cell_view import BudgetView, CellView, EndedRequest, LiveRequest, MemberState, MemberView, PoolView, QueueView, Stage
from router.client_messages import REASONS, STATES, timestamp, timings_message, usage_message
from tandem.v1 import cell_pb2 as pb

_MEMBER_STATES: dict[MemberState, Any] = {one: pb.MemberState.Value(f"MEMBER_STATE_{one.name}") for one in MemberState}
_STAGES: dict[Stage, Any] = {one: pb.RequestStage.Value(f"REQUEST_STAGE_{one.name}") for one in Stage}


def cell_message(view: CellView) -> Any:
    """The whole view."""
    return pb.CellView(
        at=timestamp(view.at),
        router=view.router,
        model=view.model,
        model_snapshot=view.model_snapshot,
        context_tokens=view.context_tokens,
        store_available=view.store_available,
        draining=view.draining,
        routers=[
            pb.RouterView(name=one.name, address=one.address, lease_left_s=one.lease_left_s, tells=one.tells)
            for one in view.routers
        ],
        pools=[_pool(one) for one in view.pools],
        queue=_queue(view.queue),
        budgets=[_budget(one) for one in view.budgets],
        running_requests=view.running_requests,
        requests=[_live(one) for one in view.requests],
        ended_requests=view.ended_requests,
        ended=[_ended(one) for one in view.ended],
    )


def _pool(pool: PoolView) -> Any:
    return pb.PoolView(role=pool.role, members=[_member(one) for one in pool.members])


def _member(one: MemberView) -> Any:
    pages = one.pages
    return pb.MemberView(
        name=one.name,
        incarnation=one.incarnation,
        address=one.address,
        state=_MEMBER_STATES[one.state],
        reason=one.reason,
        news_age_s=one.news_age_s,
        running_sequences=one.running_sequences,
        paused_sequences=one.paused_sequences,
        waiting_sequences=one.waiting_sequences,
        preempted_sequences=one.preempted_sequences,
        max_sequences=one.max_sequences,
        waiting_tokens=one.waiting_tokens,
        steps_per_s=one.steps_per_s,
        tokens_per_s=one.tokens_per_s,
        step_s=one.step_s,
        pages=pb.PageStates(
            free=pages.free,
            owned=pages.owned,
            cached=pages.cached,
            granted=pages.granted,
            quarantined=pages.quarantined,
            pinned=pages.pinned,
        ),
        page_tokens=one.page_tokens,
        computes_prompts=one.computes_prompts,
        adapters=one.adapters,
    )


def _queue(queue: QueueView) -> Any:
    return pb.QueueView(
        requests=queue.requests,
        tokens=queue.tokens,
        max_requests=queue.max_requests,
        tenants=queue.tenants,
        lanes=[pb.QueueLane(priority=one.priority, requests=one.requests, oldest_s=one.oldest_s) for one in queue.lanes],
    )


def _budget(one: BudgetView) -> Any:
    budget = one.budget
    return pb.BudgetView(
        resource=budget.resource.value, scope=budget.scope.value, name=budget.name, used=one.used, limit=one.limit
    )


def _live(one: LiveRequest) -> Any:
    return pb.LiveRequest(
        request_id=one.request_id,
        tenant=one.tenant,
        adapter=one.adapter,
        state=STATES[one.state],
        stage=_STAGES[one.stage],
        attempt=one.attempt,
        priority=one.priority,
        age_s=one.age_s,
        in_state_s=one.in_state_s,
        prompt_tokens=one.prompt_tokens,
        computed_prompt_tokens=one.computed_prompt_tokens,
        cached_prompt_tokens=one.cached_prompt_tokens,
        output_tokens=one.output_tokens,
        max_output_tokens=one.max_output_tokens,
        choices=one.choices,
        prefill_member=one.prefill_member,
        decode_member=one.decode_member,
        readers=one.readers,
        unsent_bytes=one.unsent_bytes,
        timings=timings_message(one.timings),
    )


def _ended(one: EndedRequest) -> Any:
    return pb.EndedRequest(
        request_id=one.request_id,
        tenant=one.tenant,
        adapter=one.adapter,
        state=STATES[one.state],
        finish_reason=REASONS[one.ending.reason],
        cause=one.ending.cause.value,
        at=timestamp(one.at),
        attempts=one.attempts,
        priority=one.priority,
        prefill_member=one.prefill_member,
        decode_member=one.decode_member,
        usage=usage_message(one.usage) if one.usage is not None else None,
        timings=timings_message(one.timings),
    )

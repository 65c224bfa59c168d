"""What a request may have come to, given what was done to its cell."""

from dataclasses import dataclass

import grpc

from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import label
from tests.chaos.clients import Story
from tests.chaos.plan import ROUTER_ENDS, Kind, Manner, Order, Plan
from tests.chaos.undisturbed import Expected

#: Another decode member goes on with what a lost one was serving.
RESUMES = True
#: A stream can be taken up again through any router, by Attach or by asking again.
ATTACHES = True
#: A request outlives its router: another one adopts it.
ADOPTS = True

#: Requests of one tenant at a time, at each router.
TENANT_AT_ONCE = 2
_STATUS = {
    pb.REQUEST_STATE_FINISHED: grpc.StatusCode.OK,
    pb.REQUEST_STATE_CANCELLED: grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Told:
    """The end that a client was told. finish_reason: None where its door does not say."""

    state: int
    finish_reason: int | None


def judge(plan: Plan, order: Order, story: Story, expected: Expected, record: pb.RequestRecord | None) -> str:
    """The outcome in a word. Raises AssertionError when it is not one of the right ones.

    `record` is None when the store does not know the request.
    """
    assert not story.broken, story.broken
    numbers = sorted(story.events)
    if story.gap:
        assert plan.hits(ROUTER_ENDS, "router"), f"events {numbers}, and no router was lost"
        del numbers[-1]
    assert numbers == list(range(len(numbers))), f"events {numbers}"
    _judge_outputs(story, expected)
    completed = story.completed
    if record is None:
        # A store that lost its memory knows nothing of what had ended before.
        known = completed is not None or bool(story.events)
        assert not known or plan.hits({Kind.KILL, Kind.TERM}, "store"), "the store has no record"
    elif completed is not None and completed.state != pb.REQUEST_STATE_UNSPECIFIED:
        judge_record(plan, Told(completed.state, completed.finish_reason), record)
    for connection in story.connections:
        if connection.refused:
            judge_refusal(plan, order, connection.reason, connection.retry_after_s)
        # Its router was lost between the end and its status.
        cut = connection.status is grpc.StatusCode.UNAVAILABLE and plan.hits(ROUTER_ENDS, "router")
        assert not connection.terminal or cut or connection.status is _status_of(story), (connection, completed)
    if completed is None:
        return _judge_endless(plan, story, record)
    if completed.cause == "overall_deadline" and order.shape.overall_s:
        assert completed.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED, completed
        return "out of time"
    if completed.state == pb.REQUEST_STATE_FINISHED:
        _judge_served(story, expected)
        return "served" if not story.gap else "end alone"
    if completed.state == pb.REQUEST_STATE_CANCELLED:
        assert order.manner is Manner.CANCEL or completed.cause == "client_gone", completed
        assert completed.finish_reason == pb.FINISH_REASON_CANCELLED
        return "cancelled"
    failure = f"FAILED {label(pb.FinishReason, completed.finish_reason)}/{completed.cause}"
    assert completed.cause in excuses(plan, order, bool(story.tokens), record), failure
    return f"failed ({completed.cause})"


def _judge_outputs(story: Story, expected: Expected) -> None:
    """Each output is what it is undisturbed, or a beginning of that."""
    for index, output in story.outputs.items():
        whole = expected.outputs.get(index)
        if whole is None and story.several and story.completed and story.completed.state != pb.REQUEST_STATE_FINISHED:
            # Of several that were cut short another one may be the likeliest; its undisturbed text is not known here.
            assert output.finish_reason == story.completed.finish_reason, (
                f"output {index} has ended and was never to be told: {output}"
            )
            continue
        assert whole is not None, f"output {index} was never to be told: {output}"
        # What was held back for a stop that never came to its end is told with the end.
        assert (whole.text + whole.matched_stop).startswith(output.text), f"{output.text!r} is no beginning of {whole.text!r}"
        if story.several and output.finish_reason == whole.finish_reason:
            assert output == whole, f"output {index} has ended and is {output}, not {whole}"


def _judge_served(story: Story, expected: Expected) -> None:
    completed = story.completed
    assert completed is not None
    assert story.outputs == expected.outputs or story.gap, f"{story.outputs}, not {expected.outputs}"
    assert completed.finish_reason == expected.finish_reason, label(pb.FinishReason, completed.finish_reason)
    usage = completed.usage
    counts = (usage.prompt_tokens, usage.selected_tokens, usage.returned_tokens)
    assert counts == (expected.prompt_tokens, expected.selected_tokens, expected.returned_tokens), f"{counts}, not {expected}"


def _judge_endless(plan: Plan, story: Story, record: pb.RequestRecord | None) -> str:
    """No terminal event: the client left, or lost its router for good."""
    if story.left:
        return "left"
    last = story.connections[-1]
    if is_forgotten(plan) and last.status is grpc.StatusCode.NOT_FOUND:
        return "forgotten"
    finished = record is not None and record.state == pb.REQUEST_STATE_FINISHED
    if plan.hits(ROUTER_ENDS, "router") and finished and last.status is grpc.StatusCode.OUT_OF_RANGE:
        return "gone"  # its events were with its router
    said = f"{last.call} at router-{last.router}: {last.status.name} {last.said}"
    assert not ADOPTS and plan.hits(ROUTER_ENDS, "router") and last.status is grpc.StatusCode.UNAVAILABLE, f"no end, {said}"
    return "cut off"


def is_forgotten(plan: Plan) -> bool:
    """Whether a request may have gone with the store's memory and with its router's."""
    return plan.hits({Kind.KILL, Kind.TERM}, "store") and plan.hits(ROUTER_ENDS, "router")


def judge_record(plan: Plan, told: Told, record: pb.RequestRecord | None) -> None:
    """Whether the record has the end that the client was told."""
    if record is None:
        assert plan.hits({Kind.KILL, Kind.TERM}, "store"), "the store has no record"
        return
    # The store stood still at the end, and its router was gone before it could write that.
    unwritten = plan.hits({Kind.FREEZE, Kind.CUT, Kind.UNPLUG}, "store") and plan.hits({Kind.KILL}, "router")
    if unwritten and record.cause == "router_lost":
        return
    stored = Told(record.state, None if told.finish_reason is None else record.finish_reason)
    assert told == stored, f"the client was told {told}, the record says {stored}: {record.transitions}"


def judge_refusal(plan: Plan, order: Order, reason: str, retry_after_s: float | None) -> None:
    """Whether there was no room, and the client was told when to come back."""
    assert retry_after_s is not None and retry_after_s > 0, f"refused for {reason} without a time to come back"
    own = [one for one in plan.orders if one.tenant == order.tenant]
    calls = len(own) + sum(one.manner is Manner.TWICE for one in own)
    assert reason == "TENANT_CONCURRENCY" and calls > TENANT_AT_ONCE, f"refused for {reason}, with {calls} calls of the tenant"


def _status_of(story: Story) -> grpc.StatusCode:
    assert story.completed is not None
    out_of_time = story.completed.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED
    failed = grpc.StatusCode.DEADLINE_EXCEEDED if out_of_time else grpc.StatusCode.UNAVAILABLE
    return _STATUS.get(story.completed.state, failed)


def excuses(plan: Plan, order: Order, has_tokens: bool, record: pb.RequestRecord | None) -> set[str]:
    """Causes of a failure that nobody could have prevented."""
    causes = set()
    if not RESUMES and plan.hits(ROUTER_ENDS, "decode"):
        causes |= {"decode_lost", "handover_failed", "shutting_down"}
    if plan.hits({Kind.TERM}, "router"):
        causes.add("shutting_down")
    slow = order.manner in (Manner.SLOW, Manner.CRAWL) and record is not None
    delivering = slow and any(step.state == pb.REQUEST_STATE_DRAINING for step in record.transitions)
    only_there = delivering and plan.hits(ROUTER_ENDS, "decode")
    if plan.hits(ROUTER_ENDS, "router") and (only_there or not (ADOPTS and has_tokens)):
        # Nobody but the lost router had its body; or what a slow client had not read was with it and with a member that is gone.
        causes.add("router_lost")
    return causes

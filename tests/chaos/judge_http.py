"""What a request that came through the HTTP door may have come to, given what was done to its cell."""

from lifecycle.finish import Cause
from tandem.v1 import inference_pb2 as pb
from tests.chaos.http_answers import Call, Choice, HttpStory
from tests.chaos.judge import Told, excuses, is_forgotten, judge_record, judge_refusal
from tests.chaos.outputs import Output
from tests.chaos.plan import ROUTER_ENDS, Kind, Manner, Order, Plan
from tests.chaos.undisturbed import Expected

_REASONS: dict[int, str] = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop",
    pb.FINISH_REASON_MAX_OUTPUT_TOKENS: "length",
}
_GONE = Cause.CLIENT_GONE.value.upper()
_CANCELLED = Cause.CLIENT_CANCEL.value.upper()
_OUT_OF_TIME = Cause.RPC_DEADLINE.value.upper()


def judge_http(plan: Plan, order: Order, story: HttpStory, expected: Expected, record: pb.RequestRecord | None) -> str:
    """The outcome in a word. Raises AssertionError when it is not one of the right ones. `record`: as in `judge`."""
    assert not story.broken, story.broken
    outputs = _numbered(order, expected)
    for index, choice in story.told.items():
        _judge_choice(choice, outputs[index])
    for call in story.connections:
        if call.refused:
            judge_refusal(plan, order, call.code, call.retry_after_s)
        assert not call.broken_off or plan.hits({Kind.KILL, Kind.TERM}, "router"), f"broken off, and no router ended: {call}"
    if story.left:
        _judge_left(plan, record)
        return "left"
    if story.served:
        _judge_served(story, outputs, expected)
        judge_record(plan, Told(pb.REQUEST_STATE_FINISHED, expected.finish_reason), record)
        return "served"
    return _judge_error(plan, order, story, record)


def _numbered(order: Order, expected: Expected) -> dict[int, Output]:
    """The outputs by the numbers that the HTTP door gives them: those that were chosen of more have new ones."""
    ranked = order.shape.best_of > max(1, order.shape.choices)
    return dict(enumerate(expected.outputs.values())) if ranked else expected.outputs


def _judge_choice(choice: Choice, whole: Output) -> None:
    """It is what it is undisturbed, or a beginning of that."""
    assert (whole.text + whole.matched_stop).startswith(choice.text), f"{choice.text!r} is no beginning of {whole.text!r}"
    # Nothing but the status tells that a request failed, was cancelled or ran out of time.
    if choice.finish_reason is not None:
        assert whole.finish_reason is not None
        wanted = Choice(whole.text, _REASONS[whole.finish_reason], whole.matched_stop or None)
        assert choice == wanted, f"{choice}, not {wanted}"


def _judge_left(plan: Plan, record: pb.RequestRecord | None) -> None:
    """Nobody comes back to it: it was cancelled, if it had not ended before."""
    if record is not None and record.state != pb.REQUEST_STATE_FINISHED and not plan.hits(ROUTER_ENDS, "router"):
        ended = (record.state, record.cause)
        assert ended == (pb.REQUEST_STATE_CANCELLED, Cause.CLIENT_GONE.value), f"its client left, the record says {record}"


def _judge_served(story: HttpStory, outputs: dict[int, Output], expected: Expected) -> None:
    reasons = {index: choice.finish_reason for index, choice in story.told.items()}
    wanted = {index: _REASONS[output.finish_reason] for index, output in outputs.items() if output.finish_reason is not None}
    assert reasons == wanted, f"{reasons}, not {wanted}"
    assert story.usage is not None
    counts = (story.usage["prompt_tokens"], story.usage["completion_tokens"])
    assert counts == (expected.prompt_tokens, expected.billed_tokens), f"{counts}, not {expected}"


def _judge_error(plan: Plan, order: Order, story: HttpStory, record: pb.RequestRecord | None) -> str:
    last = story.connections[-1]
    said = f"{last.status} {last.code} {last.said}"
    if last.code == _OUT_OF_TIME:
        _judge_out_of_time(order, story, record, said)
        return "out of time"
    if last.code in (_CANCELLED, _GONE):
        assert last.status == 499 and (last.code == _GONE or order.manner is Manner.CANCEL), said
        judge_record(plan, Told(pb.REQUEST_STATE_CANCELLED, pb.FINISH_REASON_CANCELLED), record)
        return "cancelled"
    if last.code == "REPLAY_GONE":
        finished = record is not None and record.state == pb.REQUEST_STATE_FINISHED
        assert last.status == 410 and plan.hits(ROUTER_ENDS, "router") and finished, said
        return "gone"
    if last.code == "UNKNOWN_REQUEST" and is_forgotten(plan):
        return "forgotten"
    _judge_failed(plan, order, story, record, last)
    return f"failed ({last.code.lower()})"


def _judge_out_of_time(order: Order, story: HttpStory, record: pb.RequestRecord | None, said: str) -> None:
    assert order.limit_s and story.connections[-1].status == 504, said
    # Asked once, it is the request's own end; asked again, it is that of who follows it. It may not have begun.
    if len(story.connections) == 1 and record is not None:
        assert record.cause == Cause.RPC_DEADLINE.value, f"{said}, and the record says {record.cause}: {record.transitions}"


def _judge_failed(plan: Plan, order: Order, story: HttpStory, record: pb.RequestRecord | None, last: Call) -> None:
    assert last.status == 503, f"{last.status} {last.code} {last.said}"
    cause = last.code.lower()
    assert cause in excuses(plan, order, bool(story.tokens), record), f"FAILED {cause}"
    judge_record(plan, Told(pb.REQUEST_STATE_FAILED, None), record)

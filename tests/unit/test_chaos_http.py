"""What rounds of chaos take for right of clients that speak HTTP, and what not."""

from typing import Any

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.chaos.cancelling import Broken
from tests.chaos.http_answers import Answer, Call, HttpStory
from tests.chaos.judge import TENANT_AT_ONCE
from tests.chaos.judge_http import judge_http
from tests.chaos.outputs import Output
from tests.chaos.plan import TENANTS, Door, Fault, Kind, Manner, Order, Phase, Plan, plan_of
from tests.chaos.shapes import SHAPES, SHAPES_OF_CHATS, SHAPES_OF_CHOICES
from tests.chaos.undisturbed import Expected

LIMIT, STOP = pb.FINISH_REASON_MAX_OUTPUT_TOKENS, pb.FINISH_REASON_STOP_SEQUENCE
EXPECTED = Expected({0: Output("one two", 2, "", LIMIT), 1: Output("three", 1, ".", STOP)}, LIMIT, 5, 3, 3, 4)
FINISHED = pb.RequestRecord(state=pb.REQUEST_STATE_FINISHED, finish_reason=LIMIT)
FAILED = pb.RequestRecord(state=pb.REQUEST_STATE_FAILED)
KILLED = Fault(Kind.KILL, ("router-0",), Phase.LATE, 0, 0.0, 1.0)
DONE = "[DONE]"


def piece(index: int, text: str, end: str | None = None, stop: str | None = None, tokens: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": end, "stop_reason": stop}
    return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


def counts(output: int = 4) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": output}}


WHOLE = (piece(0, "one "), piece(1, "three", "stop", "."), piece(0, "two", "length"), counts(), DONE)
BROKE_DOWN = {"error": {"code": "ROUTER_LOST", "status": 503}}


def read(*events: object) -> Answer:
    answer = Answer(2)
    for event in events:
        if isinstance(event, dict):
            answer.chunk(event)
        else:
            answer.end()
    return answer


def story_of(*answers: tuple[Call, tuple[object, ...]]) -> HttpStory:
    story = HttpStory("r", 2)
    for call, events in answers:
        story.take(read(*events))
        story.connections.append(call)
    return story


def judged(story: HttpStory, record: pb.RequestRecord | None = FINISHED, manner: Manner = Manner.READ, **changes: Any) -> str:
    faults = changes.pop("faults", ())
    order = Order(SHAPES_OF_CHOICES[0], 0, manner, 1, 0.0, False, Door.STREAM, TENANTS[0], **changes)
    return judge_http(Plan("s", (order,), faults), order, story, EXPECTED, record)


def test_a_whole_answer_is_served_however_often_it_was_begun() -> None:
    assert judged(story_of((Call(0, 200), WHOLE))) == "served"
    again = story_of((Call(0, 0), WHOLE[:1]), (Call(1, 503, "DRAINING"), ()), (Call(0, 200), WHOLE))
    assert judged(again, faults=(KILLED,)) == "served"
    with pytest.raises(AssertionError, match="no router ended"):
        judged(again)


@pytest.mark.parametrize(
    "events",
    [
        (piece(0, "one", "length"), piece(0, " two")),
        (piece(2, "four"),),
        (piece(0, "one two", "length"), counts()),
        (*WHOLE[:3], DONE),
        (*WHOLE, DONE),
        (*WHOLE, piece(0, "")),
        (piece(0, "one "), BROKE_DOWN, piece(0, "two")),
        (piece(0, "one "), BROKE_DOWN, BROKE_DOWN),
    ],
)
def test_a_stream_has_one_end_and_nothing_after_it(events: tuple[object, ...]) -> None:
    with pytest.raises(Broken):
        read(*events)


def test_an_error_and_done_are_an_end_too() -> None:
    assert read(piece(0, "one "), BROKE_DOWN, DONE).done


def test_what_comes_again_is_what_came_before() -> None:
    with pytest.raises(Broken, match="came again and was another"):
        story_of((Call(0, 0), (piece(0, "one "),)), (Call(1, 0), (piece(0, "two"),)))
    with pytest.raises(Broken, match="came again and was another"):
        story_of((Call(0, 0), (piece(1, "three", "stop", "."),)), (Call(1, 0), (piece(1, "three", "length"),)))
    assert story_of((Call(0, 0), (piece(0, "one "),)), (Call(1, 0), (piece(0, "o"),))).told[0].text == "one "


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ((piece(0, "two", "length"), *WHOLE[1:2], counts(), DONE), "is no beginning"),
        ((*WHOLE[:2], piece(0, "two", "stop"), counts(), DONE), "not Choice"),
        ((piece(0, "one", "length"), *WHOLE[1:2], counts(), DONE), "not Choice"),
        ((*WHOLE[:3], counts(3), DONE), r"\(5, 3\), not"),
    ],
)
def test_what_is_served_is_what_it_is_undisturbed(events: tuple[object, ...], wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        judged(story_of((Call(0, 200), events)))


def test_errors_are_those_that_could_not_be_prevented() -> None:
    lost = story_of((Call(0, 503, "ROUTER_LOST"), ()))
    assert lost.over and judged(lost, FAILED, faults=(KILLED,)) == "failed (router_lost)"
    for record, faults in ((FAILED, ()), (FINISHED, (KILLED,))):
        with pytest.raises(AssertionError):
            judged(lost, record, faults=faults)
    cancelled = story_of((Call(0, 499, "CLIENT_CANCEL"), ()))
    ended = pb.RequestRecord(state=pb.REQUEST_STATE_CANCELLED, finish_reason=pb.FINISH_REASON_CANCELLED)
    assert judged(cancelled, ended, Manner.CANCEL) == "cancelled"
    for record, manner in ((ended, Manner.READ), (FINISHED, Manner.CANCEL)):
        with pytest.raises(AssertionError):
            judged(cancelled, record, manner)
    with pytest.raises(AssertionError, match="500"):
        judged(story_of((Call(0, 500, "INTERNAL"), ())), FAILED, faults=(KILLED,))


def test_a_time_limit_is_the_end_of_who_has_one() -> None:
    late = story_of((Call(0, 504, "RPC_DEADLINE"), WHOLE[:1]))
    ended = pb.RequestRecord(cause="rpc_deadline")
    assert judged(late, ended, limit_s=1.0) == "out of time"
    for record, limit_s in ((ended, 0.0), (FINISHED, 1.0)):
        with pytest.raises(AssertionError):
            judged(late, record, limit_s=limit_s)


def test_a_tenant_is_refused_when_it_asks_for_too_much_and_told_when_to_come_back() -> None:
    refused = Call(0, 429, "TENANT_CONCURRENCY", retry_after_s=1.0)
    order = Order(SHAPES_OF_CHOICES[0], 0, Manner.READ, 1, 0.0, False, Door.STREAM, TENANTS[0])
    many = Plan("s", (order,) * (TENANT_AT_ONCE + 1), ())
    story = story_of((refused, ()), (Call(1, 200), WHOLE))
    assert refused.again and judge_http(many, order, story, EXPECTED, FINISHED) == "served"
    with pytest.raises(AssertionError, match="with 1 calls"):
        judged(story)
    with pytest.raises(AssertionError, match="without a time"):
        judge_http(many, order, story_of((Call(0, 429, "TENANT_CONCURRENCY"), ()), (Call(1, 200), WHOLE)), EXPECTED, FINISHED)


def test_rounds_have_clients_of_every_tenant_at_every_door() -> None:
    orders = [order for number in range(300) for order in plan_of(f"s-{number}").orders]
    assert {order.tenant for order in orders} == set(TENANTS)
    http = [order for order in orders if order.door is not Door.GRPC]
    assert 0.3 < len(http) / len(orders) < 0.5
    assert {(order.door, order.manner) for order in orders} == {(door, manner) for door in Door for manner in Manner}
    assert {order.shape for order in http} == {*SHAPES, *SHAPES_OF_CHOICES, *SHAPES_OF_CHATS}
    limited = [order for order in http if order.limit_s]
    assert limited and all(order.manner is Manner.READ for order in limited)
    assert not any(order.limit_s for order in orders if order.door is Door.GRPC)
    assert not any(order.shape.final_only for order in http if order.door is Door.STREAM)
    assert plan_of("s-1") == plan_of("s-1")

"""The end of a request that was ended for dead, told again to who asks from the start."""

from router.following import LOST_TERMINAL_NO
from tandem.v1 import inference_pb2 as pb
from tests.simulation.clients import Clients
from tests.simulation.scenario import draw

PLAN = draw(4).clients[0]
LOST = {
    "finish_reason": pb.FINISH_REASON_TRANSPORT_ERROR,
    "state": pb.REQUEST_STATE_FAILED,
    "cause": "router_lost",
}


def faults(number: int = LOST_TERMINAL_NO, **again: object) -> list[str]:
    """Of a client that had the end as event 1, and is told one again."""
    clients = Clients(None, (PLAN,), 1, lambda *_: None)  # type: ignore[arg-type]
    seen = clients.seen[PLAN.request_id]
    started = pb.Started(request_id=PLAN.request_id)
    first = pb.Completed(**LOST)
    clients._take(seen, pb.GenerateResponse(sequence_no=0, started=started), "started")
    clients._take(seen, pb.GenerateResponse(sequence_no=1, completed=first), "completed")
    assert clients.faults == []
    second = pb.Completed(**{**LOST, **again})
    clients._take(seen, pb.GenerateResponse(sequence_no=number, completed=second), "completed")
    return clients.faults


def test_the_same_end_may_come_with_the_number_of_who_has_nothing() -> None:
    assert faults() == []


def test_another_end_or_one_with_text_or_another_number_is_wrong() -> None:
    assert len(faults(cause="overall_deadline")) == 1
    assert len(faults(state=pb.REQUEST_STATE_FINISHED)) == 1
    assert len(faults(finish_reason=pb.FINISH_REASON_EOS)) == 1
    assert len(faults(text="a")) == 1
    assert faults(number=2) == [f"{PLAN.request_id}: completed after the terminal event"]

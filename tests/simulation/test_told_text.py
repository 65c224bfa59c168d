"""What a client may be told: a beginning of the undisturbed text, and with an end from outside what was held for a stop."""

import random
from contextlib import closing

import pytest

from engine.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tests.simulation.cell import Shape
from tests.simulation.client_plans import Cancel, ClientPlan
from tests.simulation.clients import Clients
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import Reference
from tests.simulation.scenario import Scenario
from tests.simulation.told_text import most_returned, output_of, text_fault
from tests.simulation.wires import Network, Weather
from tests.simulation.world import World

STEP_S = 0.03


def plan(cancel_after_s: float = 1.0, final_only: bool = False) -> ClientPlan:
    """Its 13th token is "alpha ", its 14th "beta": after the 13th "alpha " is held for the stop, which the 14th brings."""
    return ClientPlan(
        "held",
        at_s=0.1,
        router=0,
        prompt=(107,),
        sampling=SamplingParams(temperature=1.0, seed=3413951061),
        max_output_tokens=50,
        stops=("alpha b", "xyz"),
        final_only=final_only,
        cancels=(Cancel(cancel_after_s, 0, wait=False),),
    )


@pytest.fixture(scope="module")
def reference() -> Reference:
    return plan().reference()


def ended(reason: int, chosen: int) -> pb.Completed:
    return pb.Completed(finish_reason=reason, usage=pb.Usage(selected_tokens=chosen))


def test_the_undisturbed_text_ends_before_the_stop(reference: Reference) -> None:
    assert (reference.text, reference.usage.returned_tokens) == ("rxihwsmalpha yafv", 12)
    assert len(reference.tokens) == 14 and reference.ending.matched_stop == "alpha b"


def test_an_end_from_outside_shows_what_is_held_and_that_alone(reference: Reference) -> None:
    assert reference.ended_after(0) == ("", 0)
    assert reference.ended_after(8) == ("rxihwsmalpha ", 8)
    assert reference.ended_after(12) == ("rxihwsmalpha yafv", 12)
    assert reference.ended_after(13) == ("rxihwsmalpha yafvalpha ", 13)


def test_held_text_is_right_with_an_end_from_outside(reference: Reference) -> None:
    known, more = reference.text, "rxihwsmalpha yafvalpha "
    for reason in (pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_DEADLINE_EXCEEDED):
        assert text_fault(reference, known, more, ended(reason, 13)) == ""
        assert most_returned(reference, ended(reason, 13)) == 13
        # Tokens that were not chosen bring out nothing.
        assert text_fault(reference, known, more, ended(reason, 12)) and most_returned(reference, ended(reason, 12)) == 12
        assert text_fault(reference, "", known, ended(reason, 11))
        # The stop itself, or anything else, is never shown.
        assert text_fault(reference, known, more + "b", ended(reason, 13))
        assert text_fault(reference, known, known + "x", ended(reason, 13))
    assert text_fault(reference, "", "rxih", ended(pb.FINISH_REASON_CANCELLED, 13)) == ""
    assert text_fault(reference, known, more, pb.Completed(finish_reason=pb.FINISH_REASON_TRANSPORT_ERROR)) == ""


def test_held_text_is_wrong_before_a_stop_and_before_more(reference: Reference) -> None:
    known, more = reference.text, "rxihwsmalpha yafvalpha "
    assert text_fault(reference, known, more, ended(pb.FINISH_REASON_STOP_SEQUENCE, 14))
    assert most_returned(reference, ended(pb.FINISH_REASON_STOP_SEQUENCE, 14)) == 12
    # It may come in an output of its own, just before the end; nothing may come between.
    assert text_fault(reference, known, more) == ""
    assert text_fault(reference, more, more)
    assert text_fault(reference, known, more + "b")
    assert text_fault(reference, more, more, ended(pb.FINISH_REASON_CANCELLED, 13)) == ""


def test_an_end_that_says_nothing_of_this_run_counts_nothing_of_it(reference: Reference) -> None:
    known, more = reference.text, "rxihwsmalpha yafvalpha "
    other = ended(pb.FINISH_REASON_CANCELLED, 0)
    assert text_fault(reference, "", known, other)
    assert text_fault(reference, "", known, other, same_run=False) == ""
    assert text_fault(reference, known, more, other, same_run=False) == ""
    assert text_fault(reference, known, more + "b", other, same_run=False)


@pytest.mark.slow
@pytest.mark.parametrize("final_only", [False, True])
def test_a_cancel_at_every_step_of_a_cell(final_only: bool) -> None:
    """Whenever it comes the client has all that was chosen; once, what was held when it came."""
    told = set()
    for step in range(12, 18):
        one = plan(step * STEP_S, final_only)
        world = World(Scenario(1, Shape(prefills=0, step_s=(STEP_S, STEP_S)), Weather(slow_chance=0.0), (one,)))
        result = world.run()
        assert not result.faults, result.report()
        seen = world._clients.seen["held"]
        told.add((seen.text, seen.completed.usage.selected_tokens))
    assert ("rxihwsmalpha yafvalpha ", 13) in told


def delta(number: int, text: str, *, cumulative: bool = False) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        sequence_no=number, delta=pb.Delta(text=text, token_ids=list(text.encode()), cumulative=cumulative)
    )


def test_the_output_of_a_stream_is_known_when_none_of_its_events_is_missing() -> None:
    end = pb.GenerateResponse(sequence_no=3, completed=pb.Completed(text="c"))
    started = pb.GenerateResponse(started=pb.Started())
    assert output_of({3: end, 0: started, 2: delta(2, "b")}) is None
    assert output_of({3: end, 2: delta(2, "b"), 0: started, 1: delta(1, "a")}) == ("abc", [97, 98])
    whole = {0: started, 1: delta(1, "a", cumulative=True), 2: delta(2, "ab", cumulative=True)}
    assert output_of(whole) == ("ab", [97, 98])


@pytest.mark.parametrize(("first", "faults"), [("rxihwsmalpha ", 0), ("somebody else's ", 1)])
def test_what_an_end_came_without_is_looked_at_when_it_comes_after_all(first: str, faults: int) -> None:
    """A stored end came under its own number; later a router that had stood still has the events before it."""
    request = plan()
    with closing(VirtualLoop()) as loop:
        clients = Clients(Network(loop, random.Random(0), Weather()), (request,), 1, lambda name, what: None)
    seen = clients.seen[request.request_id]
    end = pb.Completed(finish_reason=pb.FINISH_REASON_CANCELLED, state=pb.REQUEST_STATE_CANCELLED)
    last = pb.GenerateResponse(sequence_no=2, completed=end)
    seen.calls, seen.gap = 2, True
    clients._take(seen, last, "completed")
    for event, kind in (
        (pb.GenerateResponse(started=pb.Started()), "started"),
        (delta(1, first), "delta"),
        (last, "completed"),
    ):
        clients._take(seen, event, kind)
    clients._look_at_end(seen)
    assert len(clients.faults) == faults, clients.faults

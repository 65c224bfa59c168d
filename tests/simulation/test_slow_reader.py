"""When a client that reads slowly may be cut off after the end of its request."""

from dataclasses import replace

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.simulation.checks import Checks
from tests.simulation.client_plans import Behaviour
from tests.simulation.clients import Seen
from tests.simulation.loop import BEGIN_S, BEGIN_WALL_S
from tests.simulation.scenario import SEND_TIMEOUT_S, draw
from tests.simulation.wires import WINDOW_BYTES
from tests.simulation.world import World

#: A calm world, for its first client.
WORLD = draw(4)
#: A calm world in which a client is cut off rightly.
CUT_OFF = 120632
#: When its request ended.
ENDED_AT = BEGIN_S + 5.0
DUE_AT = ENDED_AT + SEND_TIMEOUT_S


def faults(*taken: tuple[float, int], back_at: float = 0.0, behaviour: Behaviour = Behaviour.SLOW) -> list[str]:
    """Of a client that took so many bytes at such times, and was cut off."""
    record = pb.RequestRecord(transitions=[pb.Transition()])
    record.transitions[0].at.FromNanoseconds(round((BEGIN_WALL_S + ENDED_AT - BEGIN_S) * 1e9))
    plan = replace(WORLD.clients[0], behaviour=behaviour)
    status, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER"
    checks = Checks(WORLD, lambda name, what: None)
    checks._end(Seen(plan, back_at=back_at, status=status, reason=reason, taken=list(taken), record=record))
    return checks.faults


def test_a_full_window_after_its_time_shows_that_a_client_was_too_slow() -> None:
    assert faults((ENDED_AT, 100), (DUE_AT + 0.5, WINDOW_BYTES - 100), (DUE_AT + 1.0, 100)) == []


def test_a_client_that_was_cut_off_with_room_in_its_window_was_wronged() -> None:
    assert len(faults((DUE_AT - 0.5, 100), (DUE_AT + 0.5, WINDOW_BYTES - 100))) == 1
    assert len(faults()) == 1


def test_a_client_that_came_back_has_its_time_from_then_on() -> None:
    assert len(faults((DUE_AT + 0.5, WINDOW_BYTES), back_at=ENDED_AT + 1.0)) == 1
    assert faults((DUE_AT + 1.5, WINDOW_BYTES), back_at=ENDED_AT + 1.0) == []


def test_a_client_that_reads_as_it_can_is_never_too_slow() -> None:
    assert len(faults((DUE_AT + 0.5, WINDOW_BYTES), behaviour=Behaviour.READ)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "wronged"), [(SEND_TIMEOUT_S, False), (SEND_TIMEOUT_S / 2, True)])
def test_a_router_that_cuts_a_client_off_too_early_is_found(timeout_s: float, wronged: bool) -> None:
    scenario = draw(CUT_OFF)
    shape = replace(scenario.shape, router={**scenario.shape.router, "send_timeout_s": timeout_s})
    result = World(replace(scenario, shape=shape)).run()
    assert any("SLOW_CONSUMER" in outcome for outcome in result.outcomes)
    assert bool(result.faults) is wronged

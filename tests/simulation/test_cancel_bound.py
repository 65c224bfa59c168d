"""When a cancel is late, by its client's word and by the record's."""

from dataclasses import replace

from tandem.v1 import inference_pb2 as pb
from tests.simulation.checks import CALM_S, Checks
from tests.simulation.clients import CancelSeen, Seen
from tests.simulation.scenario import Scenario, draw

#: A calm world, for its first client.
WORLD = draw(4)


def faults(seen: Seen, world: Scenario = WORLD) -> list[str]:
    checks = Checks(world, lambda name, what: None)
    checks._in_time(seen)
    return checks.faults


def cancelled(ended_at: float, back_at: float = 0.0, took_s: float | None = None) -> Seen:
    """Sent at 1, its cancel answered at 2."""
    plan = replace(WORLD.clients[0], overall_s=None, pause_s=0.0)
    record = pb.RequestRecord()
    record.cancel_requested_at.FromNanoseconds(2_000_000_000)
    if took_s is not None:
        record.cancel_effective_at.FromNanoseconds(2_000_000_000 + round(took_s * 1e9))
    cancels = [CancelSeen(1.5, answered_at=2.0, answer=pb.CancelResponse())]
    return Seen(plan, sent_at=1.0, back_at=back_at, ended_at=ended_at, cancels=cancels, record=record)


def test_a_client_hears_of_its_cancel_within_the_bound() -> None:
    assert faults(cancelled(2.0 + CALM_S)) == []
    assert faults(cancelled(2.1 + CALM_S)) == [
        f"{WORLD.clients[0].request_id} ended {CALM_S + 0.1:.2f} s after its cancel was answered"
    ]


def test_a_client_that_was_away_hears_of_it_within_the_bound_of_its_return() -> None:
    assert faults(cancelled(4.0 + CALM_S, back_at=4.0)) == []
    assert len(faults(cancelled(4.1 + CALM_S, back_at=4.0))) == 1


def test_a_client_that_was_away_does_not_hide_a_late_cancel() -> None:
    assert faults(cancelled(4.1, back_at=4.0, took_s=CALM_S)) == []
    assert "before that had an effect" in faults(cancelled(4.1, back_at=4.0, took_s=CALM_S + 0.1))[0]
    # Clocks may jump where faults do.
    assert faults(cancelled(4.1, back_at=4.0, took_s=CALM_S + 0.1), draw(5)) == []

"""What KEDA adds: activation, the way to and from zero, what it says while triggers fail."""

from bench.scaling.hpa import Autoscaler, Behaviour, Bounds, Policy, Rules, Unit
from bench.scaling.keda import Fallback, ScaledObject, Trigger

FREE = Behaviour(Rules((Policy(Unit.PERCENT, 10_000, 15),), 0), Rules((Policy(Unit.PERCENT, 100, 15),), 0))
LOAD = Trigger("load", 10.0, activation=5.0)
QUEUE = Trigger("queue", 1e6, activation=100.0)
THREE_FAILURES = Fallback(3, 2)


def scaled(*triggers: Trigger, fewest: int = 0, fallback: Fallback = THREE_FAILURES) -> ScaledObject:
    return ScaledObject(
        Autoscaler(Bounds(max(1, fewest), 20), FREE), triggers or (LOAD, QUEUE), fallback, fewest, cooldown_s=60.0
    )


def test_an_empty_pool_starts_when_any_trigger_is_active_and_only_then() -> None:
    assert scaled().decide(0, 0, {"load": 5.0, "queue": 100.0}).replicas == 0
    assert scaled().decide(0, 0, {"load": 0.0, "queue": 101.0}).replicas == 1
    assert scaled().decide(0, 0, {"load": None, "queue": 101.0}).replicas == 1
    assert scaled().decide(0, 0, {"load": None, "queue": None}).replicas == 0


def test_a_pool_goes_to_zero_after_the_cooldown_and_the_hpa_does_the_rest() -> None:
    one = scaled()
    assert one.decide(0, 3, {"load": 30.0, "queue": 0.0}).replicas == 3
    assert one.decide(15, 3, {"load": 4.0, "queue": 0.0}).replicas == 1  # the HPA's floor
    assert one.decide(59, 1, {"load": 4.0, "queue": 0.0}).replicas == 1
    assert one.decide(60, 1, {"load": 4.0, "queue": 0.0}).replicas == 0


def test_a_pool_that_may_not_be_empty_never_is() -> None:
    one = scaled(fewest=1)
    for now in range(0, 600, 15):
        assert one.decide(now, 1, {"load": 0.0, "queue": 0.0}).replicas == 1


def test_missing_data_hold_and_after_some_failures_ask_for_what_there_is() -> None:
    one = scaled()
    assert one.decide(0, 8, {"load": 80.0, "queue": 0.0}).replicas == 8
    for now in range(15, 900, 15):
        assert one.decide(now, 8, {"load": None, "queue": None}).replicas == 8
    assert one.decide(900, 8, {"load": 20.0, "queue": 0.0}).replicas == 2


def test_the_fallback_has_a_floor_of_its_own() -> None:
    one = scaled(fallback=Fallback(3, 5))
    sizes = [one.decide(now, 2, {"load": None, "queue": None}).replicas for now in range(0, 75, 15)]
    assert sizes == [2, 2, 2, 5, 5]


def test_one_failing_trigger_lets_the_other_grow_the_pool_and_not_shrink_it() -> None:
    one = scaled(Trigger("a", 10.0), Trigger("b", 10.0))
    for now in range(0, 150, 15):
        assert one.decide(now, 4, {"a": 10.0, "b": None}).replicas == 4
    assert one.decide(150, 4, {"a": 90.0, "b": None}).replicas == 9


def test_null_read_as_zero_shrinks_a_busy_pool_which_is_why_the_chart_says_false() -> None:
    careless = ScaledObject(Autoscaler(Bounds(1, 20), FREE), (Trigger("load", 10.0, ignore_null=True),), Fallback(3, 2), 1)
    assert careless.decide(0, 8, {"load": None}).replicas == 1

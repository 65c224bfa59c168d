"""What a soak does to its cell: one seed, the same waves; some processes are never ended; every kind of request comes."""

import dataclasses

from tests.chaos.plan import Kind, Manner
from tests.soak.waves import CALM_EVERY, KINDS, MORTAL, wave_of

WAVES = [wave_of("7", number, 16) for number in range(120)]


def test_a_seed_plays_the_same_waves() -> None:
    again = [wave_of("7", number, 16) for number in range(120)]
    assert again == WAVES
    assert wave_of("8", 1, 16) != WAVES[1]


def test_three_processes_live_all_through_and_calm_waves_come() -> None:
    for wave in WAVES:
        assert wave.calm == (wave.number % CALM_EVERY == 0)
        assert len(wave.plan.faults) <= 2
        for fault in wave.plan.faults:
            assert fault.kind in (Kind.KILL, Kind.TERM, Kind.FREEZE)
            assert fault.kind is Kind.FREEZE or fault.target[0] in (*MORTAL, "store")
            assert fault.watched < len(wave.plan.orders)
    targets = {fault.target[0] for wave in WAVES for fault in wave.plan.faults}
    assert targets == {*MORTAL, "store", "router-0", "prefill-0", "decode-0"}


def test_every_kind_of_request_comes_and_waves_are_full() -> None:
    orders = [order for wave in WAVES for order in wave.plan.orders]
    assert {order.manner for order in orders} == set(Manner)
    for shapes in KINDS.values():
        assert set(shapes) <= {order.shape for order in orders}
    assert all(len(wave.plan.orders) + wave.bad == 16 for wave in WAVES)
    assert sum(wave.bad for wave in WAVES) > len(WAVES) / 2
    late = [order for order in orders if order.shape.overall_s]
    assert late and all(order.manner is Manner.READ for order in late)


def test_even_the_smallest_wave_has_a_request_that_is_judged() -> None:
    assert all(wave_of("1", number, 2).plan.orders for number in range(200))
    assert dataclasses.asdict(wave_of("1", 0, 2))["number"] == 0

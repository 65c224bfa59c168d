"""The simulated cell: a small world runs to its end, balances, and is the same each time; its pieces say what they should."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.cell_simulation.__main__ import changed
from bench.cell_simulation.cell import REFUSED, Cell
from bench.cell_simulation.events import Events
from bench.cell_simulation.figures import Gaps, Request
from bench.cell_simulation.placing import RoundRobin
from bench.cell_simulation.service_times import ServiceTimes
from bench.cell_simulation.settings import CellSettings, Policy, Targets
from bench.cell_simulation.trace import Arrival, at_rate, parse
from decode_svc.preemption import Reservation
from engine.batch import Rows
from router.placement import DecodeView, Need, Placement, PrefillView

TIMES = ServiceTimes()
SMALL = CellSettings(prefill_members=2, decode_members=2)


def arrivals(count: int, every_s: float = 0.3) -> list[Arrival]:
    dice = random.Random(7)
    return [Arrival(every_s * number, dice.randrange(100, 20_000), dice.randrange(1, 40)) for number in range(count)]


def rows(*lengths: tuple[int, int]) -> list[Rows]:
    """Of (first position, tokens)."""
    return [Rows(str(number), range(tokens), first, ([1],), True) for number, (first, tokens) in enumerate(lengths)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(Policy))
def test_a_small_world_serves_everyone_and_balances(policy: Policy) -> None:
    outcomes = []
    for _ in range(2):
        cell = Cell(replace(SMALL, policy=policy), arrivals(40))
        outcomes.append(cell.run())
        assert cell.check() == []
        assert all(request.done and not request.failure for request in cell.requests)
        assert all(request.first_at > request.arrived_at + request.idle_prompt_s * 0.5 for request in cell.requests)
        for member in (*cell.decode, *cell.prefill):
            assert member.known.load.free_pages == member.info.total_pages
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].failed == outcomes[0].unfinished == 0 and outcomes[0].attainment > 0.5


@pytest.mark.slow
def test_too_few_pages_preempt_or_wait_and_too_long_a_queue_fails() -> None:
    busy = replace(SMALL, decode_members=1, max_output_tokens=60, queue_clock_s=2.0)
    cell = Cell(changed(busy, "reservation", "expected"), arrivals(120, 0.02))
    outcome = cell.run()
    assert cell.check() == []
    assert cell.settings.pressure.reservation is Reservation.EXPECTED
    assert outcome.failed > 0
    assert all(request.done or request.failure == "queue clock" for request in cell.requests)


@pytest.mark.slow
def test_refused_clients_come_back_as_told_until_their_patience_ends() -> None:
    few = replace(SMALL, queue=replace(SMALL.queue, max_requests=4), prefill_queued_tokens=20_000)
    patient, hasty = (Cell(replace(few, patience_s=seconds), arrivals(80, 0.05)) for seconds in (600.0, 3.0))
    patient.run()
    assert all(one.done for one in patient.requests) and patient.away == 0
    returned = [one for one in patient.requests if one.tries > 1]
    assert returned and all(one.came_at >= one.arrived_at + 1.0 for one in returned)
    hasty.run()
    gone = [one for one in hasty.requests if one.failure == REFUSED]
    assert gone and all(one.tries <= 4 for one in gone)
    assert patient.check() == hasty.check() == []


def test_a_step_costs_its_weights_its_kv_and_its_computing() -> None:
    one = TIMES.step_s(rows((1000, 1)))
    assert 0.006 < one < 0.010  # 16 GB of weights at three quarters of 3.35 TB/s, and the overhead
    assert TIMES.step_s(rows(*[(1000, 1)] * 8)) < 1.2 * one
    assert TIMES.step_s(rows((100_000, 1))) > one + 0.004
    assert 0.2 < TIMES.prompt_s(8192, 8192) < 0.4
    assert TIMES.prompt_s(65_536, 8192) > 8 * TIMES.prompt_s(8192, 8192)  # attention grows with the square
    assert 380_000 < TIMES.kv_tokens < 420_000


def test_a_trace_is_read_and_played_at_a_rate() -> None:
    lines = [json.dumps({"timestamp": at, "input_length": 5, "output_length": 0}) for at in (0, 0, 3000, 3000, 6000)]
    played = list(at_rate(parse(lines), 2.0))
    assert [round(one.at, 3) for one in played] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert {one.output_tokens for one in played} == {1}
    with pytest.raises(ValueError, match="line 2 is no request"):
        parse([lines[0], "{}"])


def test_round_robin_takes_the_next_with_room() -> None:
    decode = [DecodeView(f"d{number}", 10, 10 if number != 1 else 0, 4) for number in range(3)]
    prefill = [PrefillView(f"p{number}", 100) for number in range(2)]
    turn, need = RoundRobin(), Need(10, 5)
    taken = [turn(need, decode, prefill, random.Random(0)).placement for _ in range(4)]
    expected = [("d0", "p0"), ("d2", "p1"), ("d0", "p0"), ("d2", "p1")]
    assert taken == [Placement(target, source) for target, source in expected]
    full: Sequence[PrefillView] = [replace(view, waiting_tokens=95) for view in prefill]
    assert turn(need, decode, full, random.Random(0)).placement is None
    assert turn(need, decode, (), random.Random(0)).placement == Placement("d0")


def test_targets_ask_for_the_first_token_and_for_nearly_all_others() -> None:
    targets = Targets(first_token_s=2.0, idle_factor=2.0, inter_token_s=0.05, late_share=0.01)
    good = Request("r", 0.0, 100, 101, idle_prompt_s=1.0, first_at=3.9, tokens=101, late=1)
    assert good.met(targets) == (True, True)
    late = Request("r", 0.0, 100, 101, idle_prompt_s=0.5, first_at=3.9, tokens=101, late=2)
    assert late.met(targets) == (False, False)
    assert Request("r", 0.0, 100, 101, idle_prompt_s=1.0, first_at=1.0, tokens=100).met(targets) == (False, False)
    gaps = Gaps()
    for gap_ms in range(1, 101):
        gaps.add(gap_ms / 1e3 - 0.0005)
    assert (gaps.quantile(0.5), gaps.quantile(0.99)) == (0.05, 0.099)


def test_events_come_in_order_and_those_of_one_time_as_they_were_asked_for() -> None:
    events, seen = Events(), list[str]()
    events.at(2.0, seen.append, "late")
    events.at(1.0, seen.append, "first")
    events.at(1.0, events.after, 0.0, seen.append, "third")
    events.at(1.0, seen.append, "second")
    events.run(1.5)
    assert (seen, events.now) == (["first", "second", "third"], 1.5)
    events.run(3.0)
    assert seen[-1] == "late"

"""The autoscalers over a small simulated cell: the whole loop from scrapes to members that start and drain."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.cell_simulation.settings import CellSettings
from bench.cell_simulation.trace import Arrival
from bench.scaling.elastic_cell import ElasticCell
from bench.scaling.hpa import Bounds
from bench.scaling.load import Stretch, along
from bench.scaling.plan import Plan, Targets, behaviour
from bench.scaling.run import Blackout, Load, Outcome, run
from router.member_facts import Role

SMALL = CellSettings(prefill_members=2, decode_members=2)
#: The control loop five times as fast as in a cluster, so that little has to be simulated.
PLAN = Plan(
    Targets(backlog=20_000.0),
    Bounds(1, 12),
    Bounds(1, 12),
    behaviour(60.0, 50, 12.0, 12.0),
    scrape_s=3.0,
    sync_s=3.0,
    start_s=12.0,
)
PLAN = replace(PLAN, window=replace(PLAN.window, seconds=12.0))


def requests(count: int = 400) -> list[Arrival]:
    dice = random.Random(3)
    return [Arrival(0.5 * number, dice.randrange(2000, 16_000), dice.randrange(40, 160)) for number in range(count)]


def ran(*stretches: Stretch, blackout: Blackout | None = None, plan: Plan | None = PLAN) -> Outcome:
    outcome = run(SMALL, Load(list(along(requests(), stretches)), grouped=8), plan, blackout)
    assert outcome.faults == () and outcome.lost == 0
    return outcome


def test_requests_follow_the_stretches() -> None:
    made = list(along(requests(40), [Stretch(10, 2.0), Stretch(10, 8.0)]))
    early = [one for one in made if one.at < 10]
    assert len(early) == pytest.approx(20, abs=2) and len(made) == pytest.approx(100, abs=4)
    assert all(before.at <= after.at for before, after in pairwise(made)) and made[-1].at < 20


def test_a_member_starts_late_and_goes_when_nobody_needs_it() -> None:
    cell = ElasticCell(SMALL, requests(60), start_s=5.0)
    cell.events.run(2.0)
    cell.scale(Role.PREFILL, 4)
    cell.scale(Role.DECODE, 1)
    assert (cell.wanted(Role.PREFILL), cell.serving(Role.PREFILL)) == (4, 2)
    assert (cell.wanted(Role.DECODE), cell.serving(Role.DECODE)) == (1, 1)
    assert len(cell.scrape().decode) == 2  # it drains, and says so
    cell.scale(Role.PREFILL, 3)  # one that has not started is not started
    cell.events.run(8.0)
    assert cell.serving(Role.PREFILL) == 3
    cell.events.run(60.0)
    assert len(cell.scrape().decode) == 1
    assert cell.faults == [] and cell.check() == [] and all(one.done for one in cell.requests)
    assert cell.member_seconds(Role.PREFILL, 0.0, 60.0) == pytest.approx(2 * 60 + 58 + 0.0)


@pytest.mark.slow
def test_a_burst_is_absorbed_and_the_pool_shrinks_afterwards() -> None:
    outcome = ran(Stretch(30, 2.0), Stretch(40, 10.0), Stretch(120, 2.0))
    sizes = [after for _, pool, _, after in outcome.changes if pool == "prefill"]
    assert outcome.failed == 0
    assert max(sizes) >= 4 and sizes[-1] < max(sizes)
    again = outcome.good_again(30.0)
    assert again is not None and again <= 90


@pytest.mark.slow
def test_an_even_load_settles() -> None:
    outcome = ran(Stretch(150, 3.0))
    assert outcome.changes_after(90.0) <= 2


@pytest.mark.slow
def test_nothing_changes_while_nothing_is_measured() -> None:
    dark = Blackout(40.0, 130.0)
    outcome = ran(Stretch(40, 6.0), Stretch(120, 1.0), blackout=dark)
    assert outcome.changes_after(dark.first, dark.last) == 0
    assert outcome.changes_after(dark.last) > 0 and outcome.failed == 0

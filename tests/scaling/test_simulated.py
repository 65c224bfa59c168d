"""The autoscalers over a small simulated cell: the whole loop from scrapes to members that start and drain."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.cell_simulation.settings import CellSettings
from bench.cell_simulation.trace import Arrival
from bench.scaling.__main__ import SERVICE
from bench.scaling.elastic_cell import ElasticCell
from bench.scaling.hpa import Bounds
from bench.scaling.load import Stretch, along
from bench.scaling.plan import Plan, Targets, behaviour
from bench.scaling.run import Blackout, Load, Outcome, run
from bench.scaling.signals import Window
from router.member_facts import Role

SMALL = CellSettings(prefill_members=3, decode_members=2, service=SERVICE, page_tokens=512)
#: The control loop five times as fast as in a cluster, so that little has to be simulated.
PLAN = Plan(
    Targets(backlog=80_000.0, inter_token=0.1),
    Bounds(1, 40),
    Bounds(1, 40),
    behaviour(60.0, 50, 12.0, 12.0),
    Window(8.0, 60.0),
    scrape_s=2.0,
    sync_s=3.0,
    start_s=12.0,
)
#: Requests a second that three prefill members carry with some time to spare, and how often as many come in a burst.
RATE, MORE = 0.8, 5


def requests(count: int = 400) -> list[Arrival]:
    dice = random.Random(3)
    return [Arrival(0.5 * number, dice.randrange(2000, 16_000), dice.randrange(40, 160)) for number in range(count)]


def ran(*stretches: Stretch, blackout: Blackout | None = None, plan: Plan | None = PLAN, cell: CellSettings = SMALL) -> Outcome:
    outcome = run(cell, Load(list(along(requests(), stretches)), grouped=16), plan, blackout)
    assert outcome.faults == () and outcome.lost == 0
    return outcome


def test_requests_follow_the_stretches() -> None:
    made = list(along(requests(40), [Stretch(10, 2.0), Stretch(10, 8.0)]))
    early = [one for one in made if one.at < 10]
    assert len(early) == pytest.approx(20, abs=2) and len(made) == pytest.approx(100, abs=4)
    assert all(before.at <= after.at for before, after in pairwise(made)) and made[-1].at < 20


def test_a_member_starts_late_and_goes_when_nobody_needs_it() -> None:
    cell = ElasticCell(replace(SMALL, prefill_members=2), requests(60), start_s=5.0)
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
    outcome = ran(Stretch(60, RATE), Stretch(60, MORE * RATE), Stretch(120, RATE))
    sizes = [(at, after) for at, pool, _, after in outcome.changes if pool == "prefill"]
    most = max(after for _, after in sizes)
    assert outcome.failed == 0, "somebody waited in vain"
    assert 8 <= most <= 2 * MORE * SMALL.prefill_members, "the pool fits what is offered and not what has piled up"
    assert min(at for at, after in sizes if after >= 0.7 * most) <= 60 + 15, "few decisions make the pool"
    assert sizes[-1][1] < most / 2
    again = outcome.good_again(60.0)
    assert again is not None and again <= 60


@pytest.mark.slow
def test_who_comes_back_as_told_is_served_and_asks_for_no_more_members() -> None:
    """In a burst that the pool can not serve before its new members work, all that are refused come back: each is served in the
    end, and the pools are as large as for clients that are gone for good."""
    stretches = (Stretch(60, RATE), Stretch(80, 2 * MORE * RATE), Stretch(120, RATE))
    gone, back = (ran(*stretches, cell=replace(SMALL, patience_s=seconds)) for seconds in (0.0, 600.0))
    assert gone.refused > 20 and gone.returned == 0
    assert back.returned > 20 and back.refused == 0 and back.failed <= 0.01 * back.requests
    most = [max(size for _, pool, _, size in one.changes if pool == "prefill") for one in (gone, back)]
    assert most[1] <= 1.25 * most[0], "a request is offered once, however often its client comes"


@pytest.mark.slow
def test_who_would_wait_in_vain_is_refused_as_he_comes() -> None:
    """A pool that can not grow computes as much with the door as without, though fewer and longer prompts, since a long queue has
    more short ones to choose from; and hardly anybody fails after he has waited."""
    surge = (Stretch(10, RATE), Stretch(100, MORE * RATE))
    outcome = ran(*surge, plan=None, cell=replace(SMALL, patience_s=0.0))
    blind = ran(*surge, plan=None, cell=replace(SMALL, refuses_waits=False))
    assert blind.failed > 20 and blind.refused == 0
    assert outcome.refused > 20 and outcome.failed <= 0.15 * outcome.refused
    assert outcome.requests - outcome.refused - outcome.failed >= 0.85 * (blind.requests - blind.failed)


@pytest.mark.slow
def test_an_even_load_settles() -> None:
    outcome = ran(Stretch(200, 2 * RATE))
    assert outcome.changes_after(120.0) <= 2
    assert outcome.failed == outcome.refused == 0


@pytest.mark.slow
def test_nothing_changes_while_nothing_is_measured() -> None:
    dark = Blackout(60.0, 150.0)
    outcome = ran(Stretch(60, 3 * RATE), Stretch(160, RATE / 2), blackout=dark)
    assert outcome.changes_after(dark.first, dark.last) == 0
    assert outcome.changes_after(dark.last) > 0 and outcome.failed == 0

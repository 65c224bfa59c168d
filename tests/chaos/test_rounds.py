"""Rounds of faults while requests run, against real processes: two routers, two members of each pool, a store.

ROUNDS and SEED choose how many and which; FIRST the first one, to play a round again. After each round: every request has had
exactly one end, its text is the undisturbed run's or a beginning of it, every process holds nothing, and none has grown.
"""

import os
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from models import Tokenizer
from tests.chaos.cell import FLAGS, ChaosCell, chaos_cell
from tests.chaos.inspection import Watch, at_rest
from tests.chaos.judge import ATTACHES, TENANT_AT_ONCE
from tests.chaos.plan import Kind, Manner, Plan, plan_of
from tests.chaos.playing import play
from tests.chaos.undisturbed import Undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FIRST = int(os.environ.get("FIRST", "0"))
#: Of a failure, beside the folder that holds all of it.
TOLD_CHARACTERS = 1000
#: Among so many rounds a client that speaks HTTP is served.
MANY_ROUNDS = 10
#: What one tenant may hold: pages at both routers together, enough for the largest of the requests, and requests at each router.
LIMITS = {"tenant-pages": 30, "tenant-tokens": 420, "tenant-concurrent-requests": TENANT_AT_ONCE}
MANNERS = frozenset(Manner) if ATTACHES else frozenset(Manner) - {Manner.RETURN, Manner.TWICE}


def _commit() -> str:
    """The commit at hand: other rounds with each commit, the same ones as often as it is tested."""
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=False, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "none"


def _rounds() -> list[tuple[str, int]]:
    """(seed, number) of each round: as the environment says, or ten of seed 1 and ten of the commit."""
    if "ROUNDS" in os.environ or "SEED" in os.environ:
        seed, rounds = os.environ.get("SEED", "1"), int(os.environ.get("ROUNDS", "20"))
        return [(seed, FIRST + number) for number in range(rounds)]
    return [(seed, number) for seed in ("1", _commit()) for number in range(10)]


@dataclass(slots=True)
class Arena:
    """The cell of all rounds and what is known from earlier ones."""

    cell: ChaosCell
    undisturbed: Undisturbed = field(default_factory=Undisturbed)
    watch: Watch = field(default_factory=Watch)
    outcomes: Counter[str] = field(default_factory=Counter)
    played: int = 0
    clean: bool = True


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-chaos-") as folder,
        chaos_cell(Path(folder), {**FLAGS, "router": {**FLAGS["router"], **LIMITS}}) as cell,
    ):
        yield Arena(cell)


@pytest.mark.parametrize(("seed", "number"), _rounds())
async def test_round(arena: Arena, tokenizer: Tokenizer, seed: str, number: int) -> None:
    plan = plan_of(f"{seed}-{number}", MANNERS)
    needs_network = {Kind.CUT, Kind.UNPLUG} & {fault.kind for fault in plan.faults}
    if needs_network and arena.cell.network is None:
        pytest.skip(f"the network cannot be cut: {arena.cell.no_network}")
    began = time.monotonic()
    arena.played += 1
    print(f"\n[{arena.played} of {len(_rounds())}] SEED={seed} round {number}: {plan}", flush=True)
    try:
        outcomes = await _round(arena, plan, tokenizer)
    except BaseException as failure:
        arena.clean = False
        _tell_failure(arena, plan, f"SEED={seed} FIRST={number} ROUNDS=1", failure)
        raise
    arena.outcomes.update(outcomes)
    print(f"  {time.monotonic() - began:.1f} s: {dict(Counter(outcomes))}", flush=True)


async def test_nothing_grew(arena: Arena) -> None:
    """What processes took is checked in every round; here it is told."""
    if not arena.outcomes:
        pytest.skip("there was no round")
    print(f"\n{arena.watch.sizes(arena.cell)}\n{dict(arena.outcomes)}")
    assert arena.outcomes["served"]
    assert arena.outcomes["served by HTTP"] or arena.played < MANY_ROUNDS


async def _round(arena: Arena, plan: Plan, tokenizer: Tokenizer) -> list[str]:
    cell = arena.cell
    await _prepare(arena)
    await arena.undisturbed.learn((order.shape for order in plan.orders), cell.routers[0], tokenizer)
    judged = await play(cell, arena.undisturbed, plan, tokenizer)
    wrong = [one.wrong for one in judged if one.wrong]
    assert not wrong, "\n".join(wrong)
    await at_rest(cell)
    faults = arena.watch.log_faults(cell)
    assert not faults, "\n".join(faults)
    grown = arena.watch.measure(cell)
    assert not grown, "\n".join(grown)
    return [one.outcome for one in judged] + ["refused for its tenant"] * sum(one.refusals for one in judged)


async def _prepare(arena: Arena) -> None:
    """Every process runs, and both routers know everyone."""
    if not arena.clean:
        await arena.cell.anew()
        arena.watch.log_faults(arena.cell)
        arena.clean = True
    await arena.cell.whole()


def _tell_failure(arena: Arena, plan: Plan, again: str, failure: BaseException) -> None:
    """What failed, how to play it again, and where the logs are."""
    saved = Path(tempfile.mkdtemp(prefix=f"tandem-chaos-failed-{plan.seed}-"))
    arena.cell.save_logs(saved)
    (saved / "failure.txt").write_text(f"{plan}\n" + "".join(traceback.format_exception(failure)))
    orders = "\n".join(f"    #{at} {order}" for at, order in enumerate(plan.orders))
    print(
        f"  FAILED: {plan}\n{orders}\n  {str(failure)[:TOLD_CHARACTERS]}\n  again: make chaos {again}\n  logs: {saved}",
        flush=True,
    )

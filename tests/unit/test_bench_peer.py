"""The comparison's own course, over sides made here: turns, what is kept, what is chosen."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bench.peer.__main__ import Plan, chosen_workloads, head_of, named_sides, run_all, warm_up
from bench.series import Figure, SeriesFile
from bench.sides import ALL, OURS_SPLIT, OURS_TOGETHER, PEER_SPLIT, Side
from tandem_cli.load.door import Door
from tandem_cli.load.measured import Seen
from tandem_cli.load.workload import BadWorkload, Lengths, Level, Loop, Planned, Workload

WORKLOAD = Workload("w", "", 0, Lengths(3, 3), Lengths(2, 2), None, (Level(Loop.CLOSED, 2.0),), 2, 1, 1.0, None)


class InstantDoor:
    """Answers at once and tells who was asked; `fails` refuses everything."""

    def __init__(self, name: str, asked: list[str], fails: bool) -> None:
        self._name, self._asked, self._fails = name, asked, fails

    async def ask(self, planned: Planned, seen: Seen) -> None:
        self._asked.append(self._name)
        if self._fails:
            raise OSError("no such server")
        now = time.perf_counter()
        seen.arrivals += [(now, 1), (now, planned.output_tokens - 1)]


def side(name: str, asked: list[str], fails: bool = False) -> Side:
    @asynccontextmanager
    async def door() -> AsyncIterator[Door]:
        yield InstantDoor(name, asked, fails)

    return Side(name, door, (), {"threads": "1"})


def test_sides_take_turns_and_every_run_is_kept(tmp_path: Path) -> None:
    asked: list[str] = []
    sides = {OURS_SPLIT: side(OURS_SPLIT, asked), PEER_SPLIT: side(PEER_SPLIT, asked, fails=True)}
    plan = Plan((("stem", WORKLOAD, (OURS_SPLIT, PEER_SPLIT)),), 2, 2000)
    kept = SeriesFile(tmp_path / "kept.json")
    warm_up(sides, plan)
    asked.clear()
    kept.add(head_of("s", sides))
    run_all(sides, plan, "s", kept, Console(quiet=True))
    assert asked == [*[OURS_SPLIT] * 4, *[PEER_SPLIT] * 4] * 2
    group = kept.groups()["stem", "2 at once"]
    assert [run.round_no for run in group.runs[OURS_SPLIT]] == [0, 1]
    assert [(run.requests, run.failures) for run in group.runs[PEER_SPLIT]] == [(4, 4), (4, 4)]
    assert group.median(OURS_SPLIT, Figure.TOKENS_PER_S) is not None
    assert group.median(PEER_SPLIT, Figure.TOKENS_PER_S) is None
    assert group.head.settings[PEER_SPLIT] == {"threads": "1"} and "cores" in group.head.machine


def test_workloads_bring_the_sides_that_their_targets_compare() -> None:
    stem, workload, sides = chosen_workloads("long-beside", "", smoke=False, sides=())[0]
    assert (stem, sides, workload.beside is not None) == ("long-beside", (OURS_SPLIT, OURS_TOGETHER), True)
    assert chosen_workloads("random", "", smoke=False, sides=())[0][2] == ALL
    chosen = chosen_workloads("fixed-512-128,open-512-128,random", "0.5,8", smoke=True, sides=named_sides("2"))
    assert [[str(level) for level in workload.levels] for _, workload, _ in chosen] == [
        ["8 at once"],
        ["0.5 a second"],
        ["8 at once"],
    ]
    assert {sides for _, _, sides in chosen} == {(OURS_TOGETHER,)}
    with pytest.raises(BadWorkload, match="a level of 99"):
        chosen_workloads("random", "99", smoke=False, sides=())
    with pytest.raises(BadWorkload, match="no side 0"):
        named_sides("1,0")

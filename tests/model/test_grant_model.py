"""The grant protocol, searched exhaustively by SPIN: every order of messages, crashes and writes within the bounds below.

What is shown: no page is given out while an older grant's write can still land; nothing is decoded that is not wholly written; no
grant commits twice; no event meets a state without an edge; and (under weak fairness) every page comes back. Each planted
fault of grants.pml must be found, so that a silent model cannot pass. States searched: about 20 thousand with one grant, 0.6 to
1.0 million with two. More than CI has time for was searched without a finding: two grants of two parts and both crashes (4.5
million states), three grants of one part one after the other (8.2 million).
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.model.tables import every_edge, promela

HERE = Path(__file__).parent
NEEDED = ("spin", "gcc")
#: Of one search, in seconds.
SEARCH_S = 250
MEMORY_MB = 3000
DEPTH = 100_000


@dataclass(frozen=True)
class Found:
    """What a search says: broken rules, states, edges that were taken."""

    errors: int
    states: int
    edges: frozenset[str]
    words: str


@pytest.fixture
def search(tmp_path):
    """Searches the model with some switches; `live` looks for a fair run in which pages stay away for ever."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        sentence = f"{' and '.join(missing)} not here; on Debian: apt-get install spin gcc libc6-dev"
        # In CI a missing program is a failure: the model must be searched.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(sentence)

    def searched(*switches: str, live: bool = False) -> Found:
        for name in ("grants.pml", "grant_tables.pml"):
            shutil.copy(HERE / name, tmp_path)
        defines = [f"-D{switch}" for switch in (*switches, *(["LIVENESS"] if live else []))]
        _run(tmp_path, "spin", *defines, "-a", "grants.pml")
        kind = ["-DNFAIR=4"] if live else ["-DSAFETY"]
        # Compiling takes longer than searching where there is only one grant.
        effort = "-O0" if "GRANTS=1" in switches else "-O1"
        _run(tmp_path, "gcc", effort, "-w", *kind, f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c")
        words = _run(tmp_path, "./pan", *(["-a", "-f"] if live else []), f"-m{DEPTH}", "-n")
        errors = re.search(r"errors: (\d+)", words)
        states = re.search(r"^\s*(\d+) states, stored", words, re.MULTILINE)
        assert errors and states, words
        if errors[1] == "0":
            assert "Search not completed" not in words and "too small" not in words, words
        return Found(int(errors[1]), int(states[1]), frozenset(re.findall(r"^edge (.+)$", words, re.MULTILINE)), words)

    return searched


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=SEARCH_S)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_models_transitions_are_the_codes() -> None:
    written = (HERE / "grant_tables.pml").read_text()
    assert written == promela(), "run: python -m tests.model.tables > tests/model/grant_tables.pml"


@pytest.mark.slow
def test_two_grants_at_once_and_every_edge_of_both_tables_is_taken(search) -> None:
    found = search("GRANTS=2", "SLOTS=2", "PARTS=1")
    assert found.errors == 0, found.words
    assert found.edges == set(every_edge())


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param(("GRANTS=1", "PARTS=2"), id="one-grant"),
        pytest.param(("GRANTS=1", "PARTS=2", "SHARED_MEMORY"), id="one-grant-shared-memory"),
        pytest.param(("GRANTS=2", "PARTS=1", "SHARED_MEMORY"), id="same-pages-twice-shared-memory"),
        pytest.param(("GRANTS=2", "PARTS=2", "CRASHES_R=0"), id="same-pages-twice"),
    ],
)
def test_b02_no_page_is_given_out_while_a_write_can_land(search, switches) -> None:
    found = search(*switches)
    assert found.errors == 0, found.words


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param(("GRANTS=1", "PARTS=2", "FAULTS=2"), id="one-grant"),
        pytest.param(("GRANTS=1", "PARTS=2", "FAULTS=2", "SHARED_MEMORY"), id="one-grant-shared-memory"),
        pytest.param(("GRANTS=2", "PARTS=1", "FAULTS=1"), id="two-grants"),
    ],
)
def test_b06_every_page_comes_back(search, switches) -> None:
    found = search(*switches, live=True)
    assert found.errors == 0, found.words


#: What is planted, with which transport it does harm.
UNSAFE = [
    ("BUG_FREE_ON_REVOKE", ()),
    ("BUG_TIMEOUT_FREES", ()),
    ("BUG_FREES_WHEN_FENCE_IS_ASKED", ()),
    ("BUG_DEATH_IS_A_FENCE", ()),
    ("BUG_DESTROYING_FENCES_SHARED_MEMORY", ("SHARED_MEMORY",)),
    ("BUG_INCARNATION_IS_NOT_COMPARED", ()),
    ("BUG_NO_TOMBSTONE", ()),
    ("BUG_POSTS_AFTER_DRAINED", ()),
    ("BUG_ANSWERS_WITH_WRITES_IN_FLIGHT", ()),
    ("BUG_NOTICE_OVERTAKES_DATA", ()),
    ("BUG_COMMITS_WITH_A_PART_MISSING", ()),
    ("BUG_COMMITS_WHAT_WAS_REVOKED", ()),
    ("BUG_COMMITS_TWICE", ()),
]
STUCK = ["BUG_ASKS_ONCE", "BUG_NEVER_FENCES"]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "switches"), UNSAFE, ids=[bug for bug, _ in UNSAFE])
def test_a_planted_fault_is_found(search, bug, switches) -> None:
    found = search("GRANTS=1", "PARTS=2", bug, *switches)
    assert found.errors == 1 and "assertion violated" in found.words


@pytest.mark.slow
@pytest.mark.parametrize("bug", STUCK)
def test_a_planted_leak_is_found(search, bug) -> None:
    found = search("GRANTS=1", "PARTS=2", "FAULTS=2", bug, live=True)
    assert found.errors == 1 and "acceptance cycle" in found.words


def test_every_planted_fault_is_searched_for() -> None:
    planted = set(re.findall(r"BUG_[A-Z_]+[A-Z]", (HERE / "grants.pml").read_text()))
    assert planted == {*(bug for bug, _ in UNSAFE), *STUCK}

"""Worlds by seed: nothing may be wrong in any of them."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.world import run

CHUNK = 30
CHUNKS = 10
#: Seeds that have failed once, with a word about why: they are run always.
FAILED = Path(__file__).with_name("failed_seeds.txt")

_DIGESTS = """
import hashlib, sys
from tests.simulation.world import run
print(*(hashlib.sha256(repr(run(int(seed)).history).encode()).hexdigest() for seed in sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 1 + CHUNK * CHUNKS, CHUNK))
def test_worlds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        result = run(seed)
        assert not result.faults, result.report()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [int(line.split()[0]) for line in FAILED.read_text().splitlines() if line[:1].isdigit()])
def test_worlds_that_failed_once(seed: int) -> None:
    result = run(seed)
    assert not result.faults, result.report()


@pytest.mark.slow
def test_a_seed_gives_the_same_world_in_another_process() -> None:
    seeds = (3, 7, 18)
    here = [hashlib.sha256(repr(run(seed).history).encode()).hexdigest() for seed in seeds]
    command = [sys.executable, "-c", _DIGESTS, *map(str, seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()
    assert here == there

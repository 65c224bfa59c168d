"""A short slice of the fuzzing, the same in every run; `python -m tests.fuzz` goes on from there."""

import pytest

from tests.fuzz.target import Target, run
from tests.fuzz.targets import TARGETS

#: Cases of each target: seconds altogether.
EXAMPLES = 25


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_breaks(target: Target) -> None:
    run(target, 1, EXAMPLES)

"""What must not grow with the work: counted in lines of Python, so that the answer is the same on every machine."""

import itertools

import pytest

from bench.growth.counting import Case, lines_run
from bench.growth.live_cases import LIVE_CASES
from bench.growth.member_cases import MEMBER_CASES
from bench.growth.output_cases import OUTPUT_CASES
from bench.growth.seat_memory import REPLAY_BYTES, seat_bytes

#: More than the queue looks ahead, and a hundred times as many.
FEW, MANY = 20, 2000
#: A hundred times as much may cost a third more: buffers that are full, and logarithms.
ALLOWED = 1.33
FLAT = [case for case in (*OUTPUT_CASES, *LIVE_CASES, *MEMBER_CASES) if not case.linear]


def most_lines(case: Case, size: int) -> int:
    """Of some operations in a row, since a few of them do what others left over."""
    operation = case.prepare(size)
    return max(lines_run(operation) for _ in range(5))


def test_lines_are_counted_through_calls_and_loops() -> None:
    assert lines_run(lambda: [sum(number for number in range(100))]) > 100
    assert lines_run(lambda: None) == lines_run(lambda: None) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAT, ids=lambda case: f"{case.name}, {case.size}")
def test_what_is_there_already_costs_nothing(case: Case) -> None:
    few, many = most_lines(case, FEW), most_lines(case, MANY)
    assert many <= ALLOWED * few, f"{few} lines beside {FEW}, {many} beside {MANY}"


def test_a_walk_over_everything_is_seen() -> None:
    numbers = itertools.count()
    walk = Case("walk", "things", lambda n: lambda: [next(numbers) for _ in range(n)])
    assert most_lines(walk, MANY) > ALLOWED * most_lines(walk, FEW)


@pytest.mark.slow
def test_a_seat_costs_a_bounded_number_of_bytes() -> None:
    """A prompt of a few tokens; what came out is kept to be sent again up to replay_bytes, then 8 bytes a token stay at most."""
    waiting, full, fuller = (seat_bytes(tokens, seats=2) for tokens in (0, 1500, 2500))
    assert waiting < 16 * 1024
    assert full < waiting + 2 * REPLAY_BYTES
    assert fuller - full < 1000 * 64

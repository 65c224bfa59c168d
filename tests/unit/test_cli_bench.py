"""The options of `tandem bench`, its cancels, and its figures."""

import asyncio
from dataclasses import replace

import pytest

from tandem_cli.load.door import RequestFailed
from tandem_cli.load.drive import Run, drive
from tandem_cli.load.figures import figures, level_table
from tandem_cli.load.measured import Measured, Seen
from tandem_cli.load.options import LoadOptions, at_level, longest, workload_of
from tandem_cli.load.workload import BadWorkload, Level, Loop, Planned, find_workload, schedule


def test_options_make_a_workload() -> None:
    made = workload_of(LoadOptions(concurrency="1,16", input_tokens="16-1024", output_tokens="8", requests=40, cancel_share=0.5))
    assert made.levels == (Level(Loop.CLOSED, 1.0), Level(Loop.CLOSED, 16.0))
    assert (made.name, longest(made)) == ("16-1024/8", 1032)
    planned = schedule(made, made.levels[1], 0, 2000)
    assert len(planned) == 40 and all(16 <= len(one.prompt) <= 1024 for one in planned)
    cancels = [one for one in planned if one.cancel_after is not None]
    assert 8 < len(cancels) < 32 and all(0 <= (one.cancel_after or 0) < 8 for one in cancels)
    uncancelled = schedule(replace(made, cancel_share=0.0), made.levels[1], 0, 2000)
    assert [one.prompt for one in uncancelled] == [one.prompt for one in planned], "who is cancelled changes nothing else"


def test_an_open_loop_lasts_as_long_as_its_requests_need() -> None:
    made = workload_of(LoadOptions(rate="0.5,4"))
    assert at_level(made, Level(Loop.OPEN, 4.0), 40).arrive_s == 10.0
    assert at_level(made, Level(Loop.OPEN, 4.0), None).arrive_s == 60.0


def test_workloads_come_with_the_package() -> None:
    made = workload_of(LoadOptions(workload="trace", concurrency="2"))
    assert made.levels == (Level(Loop.CLOSED, 2.0),) and longest(made) > 1000
    assert find_workload("fixed-512-128").is_file()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (LoadOptions(concurrency="1", rate="1"), "exclude each other"),
        (LoadOptions(concurrency="1,x"), "whole numbers"),
        (LoadOptions(concurrency="0"), "over 0 and at most 4096"),
        (LoadOptions(rate=",".join(["1"] * 33)), "at most 32 levels"),
        (LoadOptions(input_tokens="9-3"), "must rise"),
        (LoadOptions(output_tokens="many"), "a number of tokens"),
        (LoadOptions(workload="trace", input_tokens="1"), "leave out --input"),
        (LoadOptions(workload="none"), "there is no workload none"),
    ],
)
def test_bad_options_are_named(options: LoadOptions, told: str) -> None:
    with pytest.raises(BadWorkload, match=told):
        workload_of(options)


def seen(*arrivals: tuple[float, int], wanted: int = 0, cancelled_at: float = 0.0) -> Seen:
    made = Seen(1.0, wanted or sum(count for _, count in arrivals), arrivals=list(arrivals), cancelled_at=cancelled_at)
    made.close(arrivals[-1][0] if arrivals else 1.0)
    return made


def test_figures_count_each_request_once() -> None:
    failed = seen((1.5, 1), wanted=4)
    refused = Seen(1.0, 4, failure="RESOURCE_EXHAUSTED: the queue is full", reason="QUEUE_FULL")
    measured = Measured(2.0, (seen((1.2, 1), (1.3, 1)), failed, refused, seen((1.4, 2), wanted=9, cancelled_at=1.25)))
    made = figures(Level(Loop.CLOSED, 4.0), measured)
    assert (made["requests"], made["ended"], made["cancelled"], made["failed"]) == (4, 1, 1, 2)
    assert made["failures"] == {"WRONG_LENGTH": 1, "QUEUE_FULL": 1}
    assert made["first_token_ms"] == {"p50": 200.0, "p99": 200.0}
    assert made["inter_token_ms"] == {"p50": 100.0, "p99": 100.0}
    assert made["cancel_ms"] == {"p50": 150.0, "p99": 150.0}
    assert (made["output_tokens_per_s"], made["requests_per_s"]) == (1.0, 0.5)
    table = level_table([(Level(Loop.CLOSED, 4.0), made)])
    assert table.as_dicts()[0]["TTFT p50 ms"] == "200.0" and table.as_dicts()[0]["cancel p99 ms"] == "150.0"


def test_a_level_without_an_end_has_no_figures() -> None:
    made = figures(Level(Loop.OPEN, 1.0), Measured(1.0, (Seen(1.0, 4, failure="x", reason="X"),)))
    assert made["first_token_ms"] == {"p50": None, "p99": None} and made["inter_token_ms"]["p50"] is None
    assert "-" in level_table([(Level(Loop.OPEN, 1.0), made)]).rows[0]


async def test_failures_are_kept_by_their_reason_and_each_end_is_told() -> None:
    class Refusing:
        async def ask(self, planned: Planned, seen: Seen) -> None:
            raise RequestFailed("RESOURCE_EXHAUSTED: the queue is full", "QUEUE_FULL")

    told: list[str] = []
    run = Run(workload_of(LoadOptions(input_tokens="4", output_tokens="2", requests=5)), Level(Loop.CLOSED, 2.0), 0, 2000)
    async with asyncio.timeout(20):
        measured = await drive(Refusing(), run, lambda one: told.append(one.reason))
    assert measured.failures_by_reason() == {"QUEUE_FULL": 5} and told == ["QUEUE_FULL"] * 5

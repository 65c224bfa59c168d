"""Workload files and the schedules that come out of them."""

import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from tandem_cli.load.workload import (
    FIRST_ID,
    FOLDER,
    BadWorkload,
    Level,
    Loop,
    Workload,
    beside_schedule,
    find_workload,
    load_workload,
    schedule,
)

VOCABULARY = 5000

FIXED = """
name = "one"
about = "a test"
prompt = 12
output = { least = 2, most = 5 }
[load]
concurrency = [1, 4]
requests_per_client = 3
requests_min = 5
"""
OPEN = """
name = "two"
about = "a test"
seed = 7
prompt = { least = 4, most = 40 }
output = 3
[load]
requests_per_s = [2]
arrive_s = 200
[beside]
prompt = 100
output = 1
requests_per_s = 0.5
"""


def written(folder: Path, text: str, name: str = "w.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def loaded(folder: Path, text: str) -> Workload:
    return load_workload(written(folder, text))


def test_a_closed_loop_has_so_many_requests_of_each_client_and_a_least_number(tmp_path: Path) -> None:
    workload = loaded(tmp_path, FIXED)
    one, four = workload.levels
    assert (one, str(four)) == (Level(Loop.CLOSED, 1.0), "4 at once")
    assert len(schedule(workload, one, 0, VOCABULARY)) == 5
    planned = schedule(workload, four, 0, VOCABULARY)
    assert len(planned) == 12
    assert all(len(request.prompt) == 12 and 2 <= request.output_tokens <= 5 and request.at_s == 0 for request in planned)
    assert {request.output_tokens for request in planned} > {2, 5}


def test_an_open_loop_arrives_at_its_mean_rate_and_in_order(tmp_path: Path) -> None:
    workload = loaded(tmp_path, OPEN)
    planned = schedule(workload, workload.levels[0], 0, VOCABULARY)
    times = [request.at_s for request in planned]
    assert times == sorted(times) and times[-1] < 200
    assert len(times) == pytest.approx(400, rel=0.15)
    gaps = [after - before for before, after in pairwise(times)]
    # Exponential: the deviation of the gaps equals their mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2)
    lengths = [len(request.prompt) for request in planned]
    assert min(lengths) >= 4 and max(lengths) <= 40 and statistics.mean(lengths) == pytest.approx(22, rel=0.15)


def test_the_same_seed_makes_the_same_requests_and_another_one_other_prompts(tmp_path: Path) -> None:
    workload = loaded(tmp_path, OPEN)
    level = workload.levels[0]
    assert schedule(workload, level, 3, VOCABULARY) == schedule(workload, level, 3, VOCABULARY)
    first, second = (schedule(workload, level, seed, VOCABULARY) for seed in (3, 4))
    assert not {request.prompt for request in first} & {request.prompt for request in second}
    assert all(FIRST_ID <= one < VOCABULARY for request in first for one in request.prompt)


def test_what_runs_beside_is_a_load_of_its_own(tmp_path: Path) -> None:
    beside = list(islice(beside_schedule(loaded(tmp_path, OPEN), 0, VOCABULARY), 100))
    assert beside[-1].at_s == pytest.approx(200, rel=0.3)
    assert all(len(request.prompt) == 100 and request.output_tokens == 1 for request in beside)
    assert list(beside_schedule(loaded(tmp_path, FIXED), 0, VOCABULARY)) == []


TRACE = """
{"block_tokens": 4}
{"at_s": 0, "prompt_tokens": 6, "output_tokens": 2, "blocks": [0, 1]}
{"at_s": 10, "prompt_tokens": 8, "output_tokens": 3, "blocks": [0, 2]}
{"at_s": 40, "prompt_tokens": 3, "output_tokens": 1, "blocks": [3]}
"""
REPLAY = """
name = "replay"
about = "a test"
trace = "t.jsonl"
[load]
requests_per_s = [0.6]
arrive_s = 4
"""


def test_a_trace_keeps_its_prefixes_and_is_stretched_to_the_rate(tmp_path: Path) -> None:
    written(tmp_path, TRACE, "t.jsonl")
    workload = loaded(tmp_path, REPLAY)
    planned = schedule(workload, workload.levels[0], 0, VOCABULARY)
    # Three requests in 40 s are 0.075 a second; eight times as fast, the last would come after 5 s, when arrivals have ended.
    assert [request.at_s for request in planned] == [0, pytest.approx(1.25)]
    assert [len(request.prompt) for request in planned] == [6, 8]
    assert planned[0].prompt[:4] == planned[1].prompt[:4] and planned[0].prompt[4:] != planned[1].prompt[4:6]
    again = schedule(workload, workload.levels[0], 1, VOCABULARY)
    assert again[0].prompt[:4] != planned[0].prompt[:4], "runs share no prefix, else a later one finds the earlier one's"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FIXED.replace("output", "outptu"), "output is missing"),
        (FIXED + "clients = 3\n", "unknown field clients"),
        (FIXED.replace("prompt = 12", "prompt = 0"), "must rise from 1"),
        (FIXED.replace("prompt = 12", 'prompt = "12"'), "prompt is '12'"),
        (FIXED.replace("[1, 4]", "[]"), "levels must be numbers over 0"),
        (FIXED.replace("[1, 4]", "[0]"), "levels must be numbers over 0"),
        (FIXED.replace("most = 5", "most = 1"), "must rise"),
        (REPLAY.replace("t.jsonl", "none.jsonl"), "none.jsonl"),
        ("name = ", "w.toml"),
    ],
)
def test_a_file_that_cannot_be_run_names_its_fault(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadWorkload, match=words):
        loaded(tmp_path, text)


def test_the_committed_files_can_be_run() -> None:
    for path in FOLDER.glob("*.toml"):
        workload = load_workload(find_workload(path.stem))
        for level in workload.levels:
            planned = schedule(workload, level, 0, 49152)
            assert planned and all(len(request.prompt) + request.output_tokens <= 4096 for request in planned)
    with pytest.raises(BadWorkload, match="fixed-512-128"):
        find_workload("nothing")


def test_the_committed_trace_shares_as_much_as_the_published_one() -> None:
    trace = load_workload(find_workload("trace")).trace
    assert trace is not None
    seen: set[int] = set()
    hits = blocks = 0
    for line in trace.lines:
        assert len(line.blocks) * trace.block_tokens >= line.prompt_tokens
        known = True
        for block in line.blocks:
            blocks += 1
            known = known and block in seen
            hits += known
            seen.add(block)
    assert hits / blocks == pytest.approx(0.37, abs=0.05)

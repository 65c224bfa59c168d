"""Figures of what clients saw, disturbances, series, targets and their table, exported metrics."""

from pathlib import Path

import pytest

from bench import disturbance, targets
from bench.disturbance import Disturbance, between, cpu_times
from bench.measured import Measured, median
from bench.peer.report import all_figures, settings
from bench.report import write_between
from bench.series import Figure, Head, RunLine, SeriesFile, figures_of
from bench.sides import OURS_SPLIT, PEER_SPLIT
from tandem_cli.load.measured import Seen, quantile
from tandem_cli.load.profile import model_table, request_table, step_table, sums_of
from tandem_cli.load.workload import Level, Loop
from telemetry.decode_metrics import DecodeMetrics
from telemetry.prefill_metrics import PrefillMetrics
from telemetry.registry import MetricsRegistry
from telemetry.router_metrics import RouterMetrics

QUIET = Disturbance(0.0, 0.0)


def seen(asked: float, *arrivals: tuple[float, int], beside: bool = False) -> Seen:
    made = Seen(asked, sum(count for _, count in arrivals), beside, list(arrivals))
    made.close(arrivals[-1][0])
    return made


def test_quantiles_are_by_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [quantile(values, share) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [1, 1, 50, 99, 100]
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.5) == 0.0


def test_a_delta_of_several_tokens_counts_as_several_gaps() -> None:
    one = seen(10.0, (11.0, 1), (11.5, 1), (12.5, 4))
    assert one.first_token_s == 1.0
    assert one.gaps_s() == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert one.tokens == 6


def test_an_answer_of_another_length_is_a_failure_and_in_no_figure() -> None:
    short = Seen(0.0, 5, arrivals=[(1.0, 2)])
    short.close(1.0)
    good, aside = seen(0.0, (2.0, 1), (3.0, 1)), seen(0.0, (9.0, 1), (99.0, 1), beside=True)
    measured = Measured(4.0, (short, good, aside), QUIET)
    assert measured.failures() == ["2 tokens came, 5 were asked for"]
    assert measured.output_tokens_per_s == 2 / 4.0
    assert (measured.first_token_s(0.5), measured.gap_s(0.99)) == (2.0, 1.0)
    assert median([measured, measured], lambda run: run.first_token_s(0.5)) == 2.0


STAT = "cpu  {} 0 {} {} 10 0 0 {} 0 0\ncpu0 0 0 0 0\n"


def test_other_processes_and_the_host_are_told_apart_from_what_is_driven() -> None:
    # 10 is driven with its child 11, 20 is the driver with a side 21 that should be idle, 30 is a stranger.
    parents = {(10, 1): 20, (11, 1): 10, (20, 1): 1, (21, 1): 20, (30, 1): 1}
    before = cpu_times(STAT.format(100, 0, 100, 0), dict.fromkeys(parents, 10), parents)
    used = {(10, 1): 40, (11, 1): 25, (20, 1): 15, (21, 1): 20, (30, 1): 30}
    after = cpu_times(STAT.format(170, 15, 195, 20), used, parents)
    found = between(before, after, [10], alone=[20])
    # 200 ticks passed; 85 were busy: 45 of the driven, 5 of the driver, so 35 of others, 20 ticks stolen.
    assert found == Disturbance(35 / 200, 20 / 200)
    assert found.disturbed
    assert not Disturbance(disturbance.OTHERS_SHARE_MAX, disturbance.STEAL_SHARE_MAX).disturbed


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    before = cpu_times(STAT.format(0, 0, 0, 0), {(10, 1): 90}, {(10, 1): 1})
    after = cpu_times(STAT.format(50, 0, 50, 0), {(10, 2): 50}, {(10, 2): 1})
    assert between(before, after, [10]) == Disturbance(0.0, 0.0)


def test_this_machines_times_can_be_read() -> None:
    times = disturbance.read_cpu_times()
    assert times.total >= times.busy + times.steal > 0
    assert disturbance.family(times, [next(iter(times.processes))[0]])


HEAD = Head("s1", "today", "a machine", "make bench-peer", {OURS_SPLIT: {"threads": "1"}, PEER_SPLIT: {"threads": "1"}})


def line(side: str, tokens_per_s: float, **changes: object) -> RunLine:
    figures = {figure.value: 100.0 for figure in Figure} | {Figure.TOKENS_PER_S.value: tokens_per_s}
    values = {
        "series": "s1",
        "workload": "fixed-512-128",
        "level": "8 at once",
        "side": side,
        "round_no": 0,
        "requests": 4,
        "failures": 0,
        "others_share": 0.0,
        "steal_share": 0.0,
        "disturbed": False,
        "figures": figures,
    }
    return RunLine(**(values | changes))


def test_only_the_latest_series_of_a_level_is_compared(tmp_path: Path) -> None:
    kept = SeriesFile(tmp_path / "kept.json")
    kept.add(Head("s0", "yesterday", "another machine", "make", {}))
    kept.add(line(OURS_SPLIT, 1000.0, series="s0"))
    kept.add(line(OURS_SPLIT, 5.0, series="s0", level="16 at once"))
    kept.add(HEAD)
    for tokens_per_s in (30.0, 10.0, 20.0):
        kept.add(line(OURS_SPLIT, tokens_per_s))
        kept.add(line(PEER_SPLIT, tokens_per_s / 2, disturbed=tokens_per_s == 10.0))
    kept.add(line(PEER_SPLIT, 9999.0, failures=1))
    groups = kept.groups()
    group = groups["fixed-512-128", "8 at once"]
    assert (group.head, groups["fixed-512-128", "16 at once"].head.series) == (HEAD, "s0")
    assert group.ratio(Figure.TOKENS_PER_S, OURS_SPLIT, PEER_SPLIT) == 2.0, "a run with a failed request counts for nothing"
    assert group.doubts([OURS_SPLIT, PEER_SPLIT]) == (2, 7)
    assert group.ratio(Figure.TOKENS_PER_S, OURS_SPLIT, "nobody") is None
    assert SeriesFile(tmp_path / "none.json").groups() == {}


def test_the_table_says_which_bound_is_met(tmp_path: Path) -> None:
    kept = SeriesFile(tmp_path / "kept.json")
    kept.add(HEAD)
    kept.add(line(OURS_SPLIT, 170.0))
    kept.add(line(PEER_SPLIT, 100.0))
    level = Level(Loop.CLOSED, 8.0)
    asked = [
        targets.Target("fixed-512-128", level, Figure.TOKENS_PER_S, 1.6, 2.0),
        targets.Target("fixed-512-128", level, Figure.TOKENS_PER_S, 1.5, 1.7),
        targets.Target("fixed-512-128", level, Figure.TOKENS_PER_S, 1.8, 2.0),
        targets.Target("fixed-512-128", level, Figure.FIRST_TOKEN_P50, 1.0, 0.9),
        targets.Target("fixed-512-128", level, Figure.GAP_P99, 0.9, 0.7),
        targets.Target("fixed-512-128", level, Figure.TOKENS_PER_S, None, None),
        targets.Target("nothing", level, Figure.TOKENS_PER_S, 1.0, 1.0),
    ]
    rows = targets.rows(kept.groups(), {"fixed-512-128": "512/128"}, asked)
    assert rows[0] == [
        *("512/128, 8 at once: output tokens/s", PEER_SPLIT, "170", "100", "1.70", "≥ 1.6", "≥ 2", "must", "0 of 2"),
    ]
    assert [row[7] for row in rows] == ["must", "aim", "**missed**", "must", "**missed**", "reported", "not measured"]
    assert len(targets.rows({}, {})) == len(targets.TARGETS)
    assert f"| 512/128 | 8 at once | {PEER_SPLIT} | 100 |" in all_figures(kept.groups(), {"fixed-512-128": "512/128"})
    assert settings(list(kept.groups().values())).count("threads: `1`") == 2


def test_every_target_names_a_workload_and_a_level_that_exist() -> None:
    from tandem_cli.load.workload import find_workload, load_workload

    for target in targets.TARGETS:
        assert target.level in load_workload(find_workload(target.workload)).levels


def test_figures_are_in_the_units_of_their_names() -> None:
    figures = figures_of(Measured(2.0, (seen(0.0, (0.25, 1), (0.5, 1)),), QUIET))
    assert figures == {
        Figure.TOKENS_PER_S.value: 1.0,
        Figure.FIRST_TOKEN_P50.value: 250.0,
        Figure.FIRST_TOKEN_P99.value: 250.0,
        Figure.GAP_P50.value: 250.0,
        Figure.GAP_P99.value: 250.0,
    }


def test_a_profile_is_what_the_metrics_grew_by() -> None:
    registry = MetricsRegistry("decode", "0")
    decode, router = DecodeMetrics(registry), RouterMetrics(registry)
    decode.step.observe(50.0)
    before = sums_of([registry.text()])
    for model_s in (0.02, 0.04):
        decode.step.observe(model_s + 0.01)
        decode.step_part.observe(model_s, "model")
        decode.step_part.observe(0.01, "text")
        decode.step_sequences.observe(8)
    router.phase.observe(0.3, "prefill")
    router.phase.observe(0.6, "decode")
    router.phase.observe(0.5, "send")
    router.end_to_end.observe(1.0)
    sums = sums_of([registry.text()]).minus(before)
    steps, request = step_table(sums, 0.1).markdown(), request_table(sums).markdown()
    assert "2 decode steps of 8.0 sequences in 0.1 s: 80.0% of the time was in steps." in steps
    assert "| model | 30.000 | 75.0% |" in steps and "| **the step** | 40.000 | 100.0% |" in steps
    assert "| send | 500.00 | 50.0% | during decode |" in request
    assert "| everything else | 100.00 | 10.0% |  |" in request


def test_a_profile_splits_the_model_where_its_backend_does() -> None:
    registry = MetricsRegistry("decode", "0")
    decode, prefill = DecodeMetrics(registry), PrefillMetrics(registry)
    assert model_table(sums_of([registry.text()])) is None
    seconds = {"qkv": 1.0, "head": 0.5}
    decode.model_from(lambda: seconds, lambda: 0, lambda: 0)
    prefill.model_from(dict, lambda: 0, lambda: 0)
    before = sums_of([registry.text()])
    seconds |= {"qkv": 1.06, "head": 0.53}
    for _ in range(2):
        decode.step.observe(0.2)
        decode.step_part.observe(0.05, "model")
    found = model_table(sums_of([registry.text()]).minus(before))
    assert found is not None
    told = found.markdown()
    assert "| qkv | 30.000 | 60.0% | - | - |" in told and "| head | 15.000 | 30.0% | - | - |" in told
    assert "| everything else | 5.000 | 10.0% | - | - |" in told and "| **all of it** | 50.000 | 100.0% | - | - |" in told


def test_text_between_markers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    write_between(path, "x", "new")
    assert path.read_text() == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError):
        write_between(path, "y", "new")

"""What a soak takes for growth: a leak under noise is found, noise, steps and short series are not."""

import random
from collections.abc import Callable

import pytest

from tests.soak.bounds import BOUNDS
from tests.soak.verdict import HOUR_S, SLOPE_SPAN_MIN_S, Bound, Sample, Series, Way, growth_of, judge_growth, slope_of

MEMORY = Bound("rss", "MiB", Way.SLOPE, 30.0, for_a_start=1.0)
FILES = Bound("descriptors", "descriptors", Way.LEVEL, 4.0, for_a_start=1.0)
EVERY_S = 20.0
SAMPLES = 60


def series(value: Callable[[float], float], figure: str = "rss", starts_every_s: float = 1e9, samples: int = SAMPLES) -> Series:
    """Samples of a figure, EVERY_S seconds apart."""
    times = [EVERY_S * number for number in range(samples)]
    return Series("decode-0.1", [Sample(at_s, int(at_s // starts_every_s), {figure: value(at_s)}) for at_s in times])


def noisy(per_hour: float, spread: float, seed: int) -> Callable[[float], float]:
    rng = random.Random(seed)
    return lambda at_s: 900.0 + per_hour * at_s / HOUR_S + rng.gauss(0.0, spread)


@pytest.mark.parametrize("seed", range(8))
def test_a_leak_is_found_under_noise_and_noise_is_none(seed: int) -> None:
    leak = growth_of(series(noisy(120.0, 5.0, seed)), MEMORY)
    assert leak is not None and leak.too_much
    assert leak.grown == pytest.approx(40.0, rel=0.3)
    assert "rss grew by" in str(leak)
    for calm in (noisy(0.0, 5.0, seed), noisy(-120.0, 5.0, seed), noisy(20.0, 5.0, seed)):
        growth = growth_of(series(calm), MEMORY)
        assert growth is not None and not growth.too_much, growth


def test_single_wild_samples_and_one_step_are_no_leak() -> None:
    wild = growth_of(series(lambda at_s: 5000.0 if at_s % 200 == 0 else 900.0), MEMORY)
    assert wild is not None and wild.grown == 0.0
    step = growth_of(series(lambda at_s: 900.0 if at_s < 200 else 960.0), MEMORY)
    assert step is not None and not step.too_much
    falling = growth_of(series(lambda at_s: 900.0 - at_s), MEMORY)
    assert falling is not None and not falling.too_much


def test_each_start_of_another_process_allows_some() -> None:
    leak = noisy(120.0, 1.0, 3)
    assert (growth := growth_of(series(leak, starts_every_s=20.0), MEMORY)) is not None and not growth.too_much
    assert growth.most == pytest.approx(30.0 * growth.span_s / HOUR_S + 59)
    assert (growth := growth_of(series(leak, starts_every_s=60.0), MEMORY)) is not None and growth.too_much


def test_short_series_are_judged_by_their_level_alone() -> None:
    short = series(noisy(10_000.0, 1.0, 4), samples=int(SLOPE_SPAN_MIN_S / EVERY_S))
    assert growth_of(short, MEMORY) is None
    few = Series("router-0.1", [Sample(at_s, 0, {"rss": at_s}) for at_s in (0.0, 300.0, 600.0, 900.0, 1200.0, 1500.0)])
    assert growth_of(few, MEMORY) is None
    growth = growth_of(series(lambda at_s: 40.0 + at_s / EVERY_S, "descriptors", samples=6), FILES)
    assert growth is not None and growth.grown == 3.0 and not growth.too_much
    assert growth_of(series(lambda at_s: 40.0, "descriptors", samples=5), FILES) is None
    assert growth_of(series(lambda at_s: 40.0, "threads"), FILES) is None


def test_counts_come_back_to_their_level() -> None:
    back = growth_of(series(lambda at_s: 90.0 if 300 < at_s < 600 else 40.0, "descriptors"), FILES)
    assert back is not None and back.grown == 0.0 and not back.too_much
    more = growth_of(series(lambda at_s: 40.0 if at_s < 600 else 46.0, "descriptors"), FILES)
    assert more is not None and more.grown == 6.0 and more.too_much


def test_what_came_before_a_process_was_warm_does_not_count() -> None:
    def warming(at_s: float) -> float:
        return 900.0 + min(at_s, 1500.0)

    whole = series(warming, samples=120)
    assert judge_growth([whole], {"decode": [MEMORY]}, 0.0).findings
    verdict = judge_growth([whole, Series("decode-1.2", [])], {"decode": [MEMORY]}, 1500.0)
    assert [growth.grown for growth in verdict.growths] == [0.0] and not verdict.findings


def test_every_role_has_bounds_and_findings_name_process_and_figure() -> None:
    assert set(BOUNDS) == {"router", "prefill", "decode", "store"}
    leaking = [Sample(one.at_s, 0, {"objects": 1e6 + 1000 * one.at_s}) for one in series(lambda _: 0.0).samples]
    for name in ("router-0.1", "prefill-1.3", "decode-0.1"):
        (finding,) = judge_growth([Series(name, leaking)], BOUNDS, 0.0).findings
        assert finding.startswith(f"{name}: objects grew by ")
    keys = [Sample(one.at_s, 0, {"other_keys": 5.0 + one.at_s / EVERY_S}) for one in series(lambda _: 0.0).samples]
    assert judge_growth([Series("store.1", keys)], BOUNDS, 0.0).findings[0].startswith("store.1: other_keys grew by ")


def test_the_slope_lies_between_its_limits() -> None:
    slope = slope_of([(at_s, 2.0 * at_s) for at_s in range(10)])
    assert (slope.median, slope.low, slope.high) == (2.0, 2.0, 2.0)
    rng = random.Random(1)
    slope = slope_of([(at_s, 2.0 * at_s + rng.gauss(0.0, 3.0)) for at_s in range(30)])
    assert slope.low < 2.0 < slope.high and slope.low < slope.median < slope.high
    assert slope_of([(0.0, 1.0), (1.0, 3.0)]).low == 2.0

"""What grew in a soak: a robust slope of each figure of each process, against a bound. Pure.

A figure is measured at rest, between waves. Its slope is the median of the slopes between every two of its samples (Theil-Sen),
so a few odd ones do not count, and with it come the limits between which the true slope lies in 95 of 100 cases (P. K. Sen, 1968,
Estimates of the regression coefficient based on Kendall's tau). It has grown when even the lower limit is over its bound: noise
does not. A count that must come back, such as descriptors, is compared as a level: the median of the last samples with that of
the first ones.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

#: Series with less are not judged by their slope: too few samples, or too short in seconds.
SLOPE_SAMPLES_MIN = 8
SLOPE_SPAN_MIN_S = 600.0
#: Samples at each end that make a level. Fewer than twice as many in all have no two ends.
LEVEL_SAMPLES = 3
#: Two-sided 95 % of the normal distribution.
_Z = 1.96
HOUR_S = 3600.0


class Way(Enum):
    """How growth is found."""

    SLOPE = "slope"
    LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Bound:
    """Most that a figure may grow: per hour by its slope, or in all by its level; and for each start of another process."""

    figure: str
    unit: str
    way: Way
    most: float
    for_a_start: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of a process at rest, `at_s` seconds after the soak began, when `starts` processes had been started in all."""

    at_s: float
    starts: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one incarnation, in order."""

    name: str
    samples: Sequence[Sample]

    def after(self, warm_s: float) -> "Series":
        """Without what came before the process was warm."""
        return Series(self.name, [one for one in self.samples if one.at_s >= warm_s])

    def points(self, figure: str) -> list[tuple[float, float]]:
        """(seconds, value) of a figure."""
        return [(one.at_s, one.figures[figure]) for one in self.samples if figure in one.figures]


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a figure, a second: the median, and its limits."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Growth:
    """What one figure of one process did. grown: in the unit of the figure over span_s; most: what it might have."""

    process: str
    bound: Bound
    samples: int
    span_s: float
    first: float
    last: float
    grown: float
    surely: float
    most: float

    @property
    def too_much(self) -> bool:
        """Whether it surely grew by more than it may."""
        return self.surely > self.most

    def __str__(self) -> str:
        return (
            f"{self.process}: {self.bound.figure} grew by {self.grown:.1f} {self.bound.unit} (surely by {self.surely:.1f}) in "
            f"{self.span_s:.0f} s, from {self.first:.1f} to {self.last:.1f}; at most {self.most:.1f} are allowed"
        )


@dataclass(slots=True)
class Verdict:
    """Every growth that was looked at."""

    growths: list[Growth] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """Sentences about what grew too much."""
        return [str(one) for one in self.growths if one.too_much]


def slope_of(points: Sequence[tuple[float, float]]) -> Slope:
    """The Theil-Sen slope of (seconds, value). At least two points, no two at the same time."""
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    count, pairs = len(points), len(slopes)
    # The spread of Kendall's S with no trend; ties make it smaller, so that these limits are too wide rather than too narrow.
    reach = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = math.floor((pairs - reach) / 2), math.ceil((pairs + reach) / 2)
    return Slope(statistics.median(slopes), slopes[max(0, low)], slopes[min(pairs - 1, high)])


def level_of(values: Sequence[float]) -> float:
    """Of the samples at one end."""
    return statistics.median(values)


def growth_of(series: Series, bound: Bound) -> Growth | None:
    """What the figure of the bound did; None when there are too few samples, or over too short a time, to tell."""
    points = series.points(bound.figure)
    if len(points) < 2 * LEVEL_SAMPLES:
        return None
    span_s = points[-1][0] - points[0][0]
    first, last = (level_of([value for _, value in part]) for part in (points[:LEVEL_SAMPLES], points[-LEVEL_SAMPLES:]))
    starts = series.samples[-1].starts - series.samples[0].starts
    most = bound.for_a_start * starts
    if bound.way is Way.LEVEL:
        grown = surely = last - first
        most += bound.most
    else:
        if len(points) < SLOPE_SAMPLES_MIN or span_s < SLOPE_SPAN_MIN_S:
            return None
        slope = slope_of(points)
        grown, surely = slope.median * span_s, slope.low * span_s
        most += bound.most * span_s / HOUR_S
    return Growth(series.name, bound, len(points), span_s, first, last, grown, surely, most)


def judge_growth(series: Sequence[Series], bounds: Mapping[str, Sequence[Bound]], warm_s: float) -> Verdict:
    """Every series against the bounds of its role. warm_s: samples earlier in the soak, or in a process's life, do not count.

    A series' name is role-number.start.
    """
    verdict = Verdict()
    for one in series:
        if not one.samples:
            continue
        warm = one.after(one.samples[0].at_s + warm_s)
        for bound in bounds[one.name.partition("-")[0].partition(".")[0]]:
            growth = growth_of(warm, bound)
            if growth is not None:
                verdict.growths.append(growth)
    return verdict

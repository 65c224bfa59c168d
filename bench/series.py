"""What was measured, kept: one file of JSON lines, one line a run, and one for each series of interleaved runs.

Only runs of one series are compared with one another. A later series of the same workload and level replaces an earlier one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median

from bench.measured import Measured


class Figure(Enum):
    """What a run is judged by."""

    TOKENS_PER_S = "output tokens/s"
    FIRST_TOKEN_P50 = "TTFT p50 ms"
    FIRST_TOKEN_P99 = "TTFT p99 ms"
    GAP_P50 = "inter-token p50 ms"
    GAP_P99 = "inter-token p99 ms"

    @property
    def more_is_better(self) -> bool:
        """Whether a higher figure is the better one."""
        return self is Figure.TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Head:
    """One series: when it began, on what, with which settings of each side, by which command."""

    series: str
    when: str
    machine: str
    command: str
    settings: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run of one side. level: as Level writes itself. figures: by Figure.value; what they mean says the column's name."""

    series: str
    workload: str
    level: str
    side: str
    round_no: int
    requests: int
    failures: int
    others_share: float
    steal_share: float
    disturbed: bool
    figures: Mapping[str, float] = field(default_factory=dict)


def figures_of(measured: Measured) -> dict[str, float]:
    """A run's figures by name."""
    return {
        Figure.TOKENS_PER_S.value: measured.output_tokens_per_s,
        Figure.FIRST_TOKEN_P50.value: measured.first_token_s(0.5) * 1e3,
        Figure.FIRST_TOKEN_P99.value: measured.first_token_s(0.99) * 1e3,
        Figure.GAP_P50.value: measured.gap_s(0.5) * 1e3,
        Figure.GAP_P99.value: measured.gap_s(0.99) * 1e3,
    }


@dataclass(frozen=True, slots=True)
class Group:
    """The interleaved runs of one level of one workload: of each side its runs, in the order of the rounds."""

    head: Head
    runs: Mapping[str, Sequence[RunLine]]

    def median(self, side: str, figure: Figure) -> float | None:
        """The median of a side's runs that had no failure; None when there is none."""
        values = [run.figures[figure.value] for run in self.runs.get(side, ()) if not run.failures]
        return median(values) if values else None

    def ratio(self, figure: Figure, ours: str, against: str) -> float | None:
        """Ours over the other's, of the medians; None when one of them is missing."""
        upper, lower = self.median(ours, figure), self.median(against, figure)
        return upper / lower if upper is not None and lower else None

    def doubts(self, sides: Iterable[str]) -> tuple[int, int]:
        """(disturbed or failed runs, all runs) of these sides."""
        runs = [run for side in sides for run in self.runs.get(side, ())]
        return sum(run.disturbed or run.failures > 0 for run in runs), len(runs)


class SeriesFile:
    """Appends and reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, line: Head | RunLine) -> None:
        """Keep one more line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps({"kind": type(line).__name__, **asdict(line)}) + "\n")

    def groups(self) -> dict[tuple[str, str], Group]:
        """The latest series of each (workload, level)."""
        heads: dict[str, Head] = {}
        runs: dict[tuple[str, str], list[RunLine]] = {}
        for text in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            values = json.loads(text)
            if values.pop("kind") == Head.__name__:
                head = Head(**values)
                heads[head.series] = head
            else:
                run = RunLine(**values)
                runs.setdefault((run.workload, run.level), []).append(run)
        return {key: _latest(heads, lines) for key, lines in runs.items()}


def _latest(heads: Mapping[str, Head], lines: Sequence[RunLine]) -> Group:
    series = lines[-1].series
    by_side: dict[str, list[RunLine]] = {}
    for line in lines:
        if line.series == series:
            by_side.setdefault(line.side, []).append(line)
    return Group(heads[series], by_side)

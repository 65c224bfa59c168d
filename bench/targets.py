"""What the comparison has to show, row by row, and what was measured beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.series import Figure, Group
from bench.sides import ALL, OURS_SPLIT, OURS_TOGETHER, PEER_SPLIT, PEER_TOGETHER
from tandem_cli.load.workload import Level, Loop

COLUMNS = ("figure", "against", "ours", "theirs", "ratio", "must", "aim", "", "disturbed runs")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a ratio must be, and what it is to become; None where it is only reported."""

    must: float | None
    aim: float | None

    def verdict(self, ratio: float | None, *, more_is_better: bool) -> str:
        """In a word."""
        if ratio is None:
            return "not measured"
        if self.must is None or self.aim is None:
            return "reported"
        for bound, word in ((self.aim, "aim"), (self.must, "must")):
            if ratio >= bound if more_is_better else ratio <= bound:
                return word
        return "**missed**"


@dataclass(frozen=True, slots=True)
class Target:
    """One ratio, ours over the other's. must, aim: bounds of it; None where it is only reported. workload: name of its file."""

    workload: str
    level: Level
    figure: Figure
    must: float | None
    aim: float | None
    against: str = PEER_SPLIT

    def verdict(self, ratio: float | None) -> str:
        """In a word."""
        return Bound(self.must, self.aim).verdict(ratio, more_is_better=self.figure.more_is_better)


def _closed(*values: int) -> list[Level]:
    return [Level(Loop.CLOSED, float(value)) for value in values]


def _targets() -> list[Target]:
    one, eight, sixteen, thirty_two = _closed(1, 8, 16, 32)
    tokens, first, gap = Figure.TOKENS_PER_S, Figure.FIRST_TOKEN_P50, Figure.GAP_P99
    main, opened = "fixed-512-128", "open-512-128"
    return [
        Target(main, one, tokens, 1.8, 2.5),
        Target(main, eight, tokens, 1.6, 2.0),
        Target(main, sixteen, tokens, 1.5, 1.8),
        Target(main, thirty_two, tokens, 1.6, 2.0),
        Target(main, one, tokens, None, None, PEER_TOGETHER),
        Target(main, eight, tokens, 1.2, 1.5, PEER_TOGETHER),
        Target(main, sixteen, tokens, 1.2, 1.5, PEER_TOGETHER),
        Target(main, thirty_two, tokens, None, None, PEER_TOGETHER),
        Target("fixed-128-128", thirty_two, tokens, 1.6, 2.0),
        Target("fixed-1024-64", eight, tokens, 1.6, 2.0),
        Target(main, one, first, 0.6, 0.45),
        Target(main, eight, first, 0.5, 0.3),
        Target(main, sixteen, gap, 0.9, 0.7),
        Target(opened, Level(Loop.OPEN, 0.5), gap, 0.9, 0.7),
        Target(opened, Level(Loop.OPEN, 1.0), gap, 0.9, 0.7),
        Target("long-beside", eight, gap, 0.3, 0.2, OURS_TOGETHER),
    ]


TARGETS: Sequence[Target] = tuple(_targets())


def sides_of(workload: str) -> tuple[str, ...]:
    """The sides that a workload's targets compare; all where it has none."""
    named = {side for target in TARGETS if target.workload == workload for side in (OURS_SPLIT, target.against)}
    return tuple(side for side in ALL if side in named) or ALL


def rows(
    groups: Mapping[tuple[str, str], Group], names: Mapping[str, str], targets: Sequence[Target] = TARGETS
) -> list[list[str]]:
    """The table's rows. names: what a workload's file calls itself."""
    made = []
    for target in targets:
        group = groups.get((target.workload, str(target.level)))
        ratio = group.ratio(target.figure, OURS_SPLIT, target.against) if group else None
        sign = "≥" if target.figure.more_is_better else "≤"
        doubtful, runs = group.doubts((OURS_SPLIT, target.against)) if group else (0, 0)
        made.append(
            [
                f"{names.get(target.workload, target.workload)}, {target.level}: {target.figure.value}",
                target.against,
                number(group.median(OURS_SPLIT, target.figure) if group else None),
                number(group.median(target.against, target.figure) if group else None),
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if target.must is None else f"{sign} {target.must:g}",
                "-" if target.aim is None else f"{sign} {target.aim:g}",
                target.verdict(ratio),
                f"{doubtful} of {runs}" if runs else "-",
            ]
        )
    return made


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"

"""From what was measured to bench/results/: the table of the targets, all figures, the settings, and pictures."""

from collections.abc import Mapping
from pathlib import Path

from bench import targets
from bench.plots import draw
from bench.report import table, write_between
from bench.series import Figure, Group, Head, SeriesFile
from tandem_cli.load.workload import FOLDER, load_workload

RESULTS = Path(__file__).resolve().parents[1] / "results"
SERIES = RESULTS / "peer.json"
README = RESULTS / "README.md"


def write_results(series: Path = SERIES, readme: Path = README) -> None:
    """Write everything that the kept runs say."""
    groups = SeriesFile(series).groups()
    names = {path.stem: load_workload(path).name for path in FOLDER.glob("*.toml")}
    write_between(readme, "targets", table(targets.COLUMNS, targets.rows(groups, names)))
    pictures = draw(groups, names, readme.parent)
    shown = "\n\n".join(f"![{path.stem}]({path.name})" for path in pictures)
    write_between(readme, "figures", f"{all_figures(groups, names)}\n\n{shown}")
    write_between(readme, "settings", settings(list(groups.values())))


def all_figures(groups: Mapping[tuple[str, str], Group], names: Mapping[str, str]) -> str:
    """Every side at every level."""
    columns = ("workload", "load", "side", *(figure.value for figure in Figure), "runs", "disturbed", "others, steal")
    rows = []
    for (workload, level), group in groups.items():
        for side, runs in group.runs.items():
            shares = f"{max(run.others_share for run in runs):.0%}, {max(run.steal_share for run in runs):.0%}"
            doubtful, _ = group.doubts([side])
            figures = [targets.number(group.median(side, figure)) for figure in Figure]
            rows.append([names.get(workload, workload), level, side, *figures, str(len(runs)), str(doubtful), shares])
    return table(columns, rows)


def settings(groups: list[Group]) -> str:
    """Machine, command and settings of each series that is shown; what two series have alike is told once."""
    told: dict[str, Head] = {group.head.series: group.head for group in groups}
    parts = []
    known: dict[str, Mapping[str, str]] = {}
    for head in sorted(told.values(), key=lambda one: one.series):
        parts.append(f"Series of {head.when}, `{head.command}`: {head.machine}.")
        for side, values in head.settings.items():
            if known.get(side) != values:
                known[side] = values
                lines = "\n".join(f"* {key}: `{value}`" for key, value in values.items())
                parts.append(f"**{side}**\n\n{lines}")
    return "\n\n".join(parts)

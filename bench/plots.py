"""Pictures of what was measured: one PNG a workload. Needs the `bench` extra (matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.series import Figure, Group

#: What is drawn side by side.
DRAWN = (Figure.TOKENS_PER_S, Figure.FIRST_TOKEN_P50, Figure.GAP_P50, Figure.GAP_P99)
WIDTH_IN, HEIGHT_IN, DPI = 15.0, 3.6, 110


def draw(groups: Mapping[tuple[str, str], Group], names: Mapping[str, str], folder: Path) -> list[Path]:
    """Write a picture for each workload: its levels along the axis, a bar for each side. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for workload in sorted({key[0] for key in groups}):
        levels = {level: group for (name, level), group in groups.items() if name == workload}
        path = folder / f"{workload}.png"
        _picture(path, names.get(workload, workload), levels)
        made.append(path)
    return made


def _picture(path: Path, title: str, levels: Mapping[str, Group]) -> None:
    from matplotlib import pyplot

    sides = list(dict.fromkeys(side for group in levels.values() for side in group.runs))
    figure, axes = pyplot.subplots(1, len(DRAWN), figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    for axis, drawn in zip(axes, DRAWN, strict=True):
        _bars(axis, drawn, levels, sides)
    figure.suptitle(f"{title} (bars: medians; lines: least and most of the runs)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(sides), frameon=False)
    # No date and no version inside: the same figures make the same file.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)


def _bars(axis: object, drawn: Figure, levels: Mapping[str, Group], sides: Sequence[str]) -> None:
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places, tops, below, above = [], [], [], []
        for place, group in enumerate(levels.values()):
            middle = group.median(side, drawn)
            if middle is None:
                continue
            values = [run.figures[drawn.value] for run in group.runs[side] if not run.failures]
            places.append(place + (number - (len(sides) - 1) / 2) * width)
            tops.append(middle)
            below.append(middle - min(values))
            above.append(max(values) - middle)
        axis.bar(places, tops, width, label=side, yerr=(below, above), capsize=2)
    axis.set_xticks(range(len(levels)), list(levels))
    axis.set_title(drawn.value, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)

"""Pictures of the dashboards: `python -m tools.dashboard_pictures http://127.0.0.1:9090 --minutes 10 --out docs/pictures`.

Each panel is drawn with matplotlib from what its queries answer, at its place in Grafana's grid, so that a dashboard can be
looked at without a Grafana. Rows that say how many panels they have are headings.
"""

import argparse
import datetime
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from tools.dashboards import NAMES, Panel, Prometheus, Series, legend, read_dashboard

#: Points across the time of a picture.
POINTS = 150
#: Inches of one column and one line of Grafana's grid, and of the title.
COLUMN_IN, LINE_IN, TITLE_IN = 0.62, 0.29, 0.55
DOTS_PER_INCH = 84
#: Most names in a legend, and characters of one.
LEGEND_MAX, NAME_MAX = 8, 24
#: Inches of one line of names.
NAME_IN = 0.16

#: Units that are counted in powers of two.
_BINARY = ("bytes", "Bps")

BACK, FIELD, INK, FAINT, GRID = "#111217", "#181b1f", "#d8d9da", "#8e8e99", "#2a2d34"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#e0556b", "#b877d9", "#56c8d8", "#ad8b00", "#8ab8ff", "#ffa6b0")
STYLE = {
    "font.size": 8.0,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.facecolor": FIELD,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "figure.facecolor": BACK,
}


def main(arguments: Sequence[str]) -> int:
    """Draws the dashboards that are named, all of them by default; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard_pictures", description="Pictures of the dashboards.")
    parser.add_argument("url", help="address of a Prometheus")
    parser.add_argument("names", nargs="*", metavar="dashboard", help=", ".join(NAMES))
    parser.add_argument("--minutes", type=float, default=10.0, help="how much time they show")
    parser.add_argument("--until", type=float, default=0.0, help="where it ends, unix seconds; now by default")
    parser.add_argument("--rate", default="30s", help="what stands for $__rate_interval: four scrapes or more")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(NAMES):
        parser.error(f"dashboard must be of {', '.join(NAMES)}; {', '.join(sorted(unknown))} is not")
    prometheus, end_s = Prometheus(chosen.url), chosen.until or time.time()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or NAMES:
        title, panels = read_dashboard(name, chosen.rate)
        figure = draw(title, panels, _Window(prometheus, end_s - chosen.minutes * 60, end_s))
        path = chosen.out / f"dashboard-{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        pyplot.close(figure)
        _make_small(path)
        print(f"{path}: {path.stat().st_size // 1000} kB")
    return 0


class _Window:
    """The time that is shown."""

    def __init__(self, prometheus: Prometheus, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self._prometheus = prometheus

    def series(self, panel: Panel) -> list[tuple[str, Series]]:
        """Everything that a panel shows, with its names."""
        step_s = (self.end_s - self.begin_s) / POINTS
        return [
            (legend(target.legend, one.labels), one)
            for target in panel.targets
            for one in self._prometheus.over(target.expression, self.begin_s, self.end_s, step_s)
        ]


def draw(title: str, panels: Sequence[Panel], window: _Window) -> Figure:
    """A figure of a whole dashboard."""
    lines = max(panel.y + panel.height for panel in panels)
    width_in, height_in = 24 * COLUMN_IN, lines * LINE_IN + TITLE_IN
    with mpl.rc_context(STYLE):
        figure = pyplot.figure(figsize=(width_in, height_in))
        figure.text(0.012, 1 - 0.3 / height_in, title, fontsize=15, weight="bold", va="center")
        for panel in panels:
            left, right = panel.x / 24, (panel.x + panel.width) / 24
            top = 1 - (TITLE_IN + panel.y * LINE_IN) / height_in
            bottom = 1 - (TITLE_IN + (panel.y + panel.height) * LINE_IN) / height_in
            box = _Box(figure, left, right, bottom, top)
            if panel.kind == "row":
                figure.text(left + 0.012, (bottom + top) / 2, panel.title, fontsize=10.5, weight="bold", va="center")
            else:
                _DRAWN[panel.kind](box, panel, window)
    return figure


class _Box:
    """The place of one panel in a figure, in shares of it."""

    def __init__(self, figure: Figure, left: float, right: float, bottom: float, top: float) -> None:
        self.figure = figure
        width_in, height_in = figure.get_size_inches()
        gap_x, gap_y = 0.05 / width_in, 0.05 / height_in
        self.left, self.right, self.bottom, self.top = left + gap_x, right - gap_x, bottom + gap_y, top - gap_y
        self.inch_x, self.inch_y = 1 / width_in, 1 / height_in
        place = (self.left, self.bottom, self.right - self.left, self.top - self.bottom)
        field = mpl.patches.Rectangle(
            place[:2], place[2], place[3], facecolor=FIELD, edgecolor=GRID, transform=figure.transFigure
        )
        field.set_zorder(-1)  # behind the axes
        figure.patches.append(field)

    def title(self, words: str) -> None:
        """Over the panel."""
        self.figure.text(self.left + 0.1 * self.inch_x, self.top - 0.15 * self.inch_y, words, fontsize=8.8, va="center")

    def axes(self, below_in: float) -> Axes:
        """Where its lines go; `below_in` is kept for the legend."""
        left, right = self.left + 0.62 * self.inch_x, self.right - 0.12 * self.inch_x
        bottom, top = self.bottom + (0.28 + below_in) * self.inch_y, self.top - 0.34 * self.inch_y
        return self.figure.add_axes((left, bottom, right - left, top - bottom))


def _stat(box: _Box, panel: Panel, window: _Window) -> None:
    box.title(panel.title)
    found = [one for _, one in window.series(panel)]
    values = [value for one in found for value in one.values if not math.isnan(value)]
    middle = (box.left + box.right) / 2
    word = shown(values[-1], panel.unit) if values else "–"
    box.figure.text(middle, box.bottom + 0.52 * box.inch_y, word, fontsize=17, color=COLOURS[0], ha="center", va="center")
    if found:
        place = (box.left, box.bottom, box.right - box.left, 0.26 * box.inch_y)
        axes = box.figure.add_axes(place)
        axes.fill_between(found[0].times, found[0].values, color=COLOURS[0], alpha=0.25, lw=0)
        axes.set_ylim(bottom=0)
        axes.set_axis_off()


def _lines(box: _Box, panel: Panel, window: _Window) -> None:
    box.title(panel.title)
    found = sorted(window.series(panel), key=lambda pair: pair[0])
    named = [(name, one) for name, one in found if any(not math.isnan(value) for value in one.values)]
    names = _told([name for name, _ in named])
    axes = box.axes(NAME_IN * -(-len(names) // _columns(names)))
    _frame(axes, panel.unit, window)
    if not named:
        axes.text(0.5, 0.5, "nothing of the kind happened", transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set_yticks([])
        return
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(named))]
    if panel.stacked:
        times, layers = _aligned([one for _, one in named])
        axes.stackplot(times, layers, colors=colours, alpha=0.55, lw=0)
    else:
        for colour, (_, one) in zip(colours, named, strict=True):
            axes.plot(one.times, one.values, color=colour, lw=1.1)
    highest = max(value for _, one in named for value in one.values if not math.isnan(value))
    axes.set_ylim(0, None if panel.stacked and highest > 0 else highest * 1.06 or 1)
    if panel.unit in _BINARY and highest > 0:
        size = 2.0 ** (10 * int(math.log2(highest) / 10)) if highest >= 1 else 1.0
        axes.yaxis.set_major_locator(MultipleLocator(size * 2.0 ** math.ceil(math.log2(highest / size / 5))))
    _names(box, names, colours)


def _heat(box: _Box, panel: Panel, window: _Window) -> None:
    box.title(panel.title)
    axes = box.axes(0.0)
    _frame(axes, "s", window)
    found = sorted((float(one.labels["le"]), one) for _, one in window.series(panel) if one.labels["le"] != "+Inf")
    if not found:
        return
    times, layers = _aligned([one for _, one in found])
    counts = [layers[0], *(_between(low, high) for low, high in itertools.pairwise(layers))]
    used = [place for place, row in enumerate(counts) if max(row) > 0]
    first, last = (used[0], used[-1]) if used else (0, len(counts) - 1)
    edges = [0.0, *(bound for bound, _ in found)]
    rows = range(last - first + 2)
    axes.pcolormesh(_edges(times), list(rows), counts[first : last + 1], cmap="inferno", shading="flat")
    every = max(1, len(rows) // 7)
    axes.set_yticks(list(rows)[::every], [shown(edges[first + row], "s") for row in rows][::every])


_DRAWN = {"stat": _stat, "timeseries": _lines, "heatmap": _heat}


def _frame(axes: Axes, unit: str, window: _Window) -> None:
    axes.set_xlim(window.begin_s, window.end_s)
    axes.grid(color=GRID, lw=0.6)
    axes.tick_params(length=0, labelsize=7.2)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, prune="both"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _clock(at)))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))


def _told(names: Sequence[str]) -> list[str]:
    """The names that fit into a legend, cut to a length that does."""
    told = [name if len(name) <= NAME_MAX else name[: NAME_MAX - 1] + "…" for name in names[:LEGEND_MAX]]
    if len(names) > LEGEND_MAX:
        told[-1] = f"and {len(names) - LEGEND_MAX + 1} more"
    return told


def _columns(told: Sequence[str]) -> int:
    """How many names stand side by side; at most four, of which at most two rows are made."""
    most = 4 if max(map(len, told), default=0) <= NAME_MAX * 2 // 3 else 3
    return max(1, min(most, len(told))) if len(told) <= 2 * most else 4


def _names(box: _Box, told: Sequence[str], colours: Sequence[str]) -> None:
    columns = _columns(told)
    rows = -(-len(told) // columns)
    for place, (name, colour) in enumerate(zip(told, colours, strict=False)):
        x = box.left + 0.15 * box.inch_x + (place % columns) * (box.right - box.left - 0.2 * box.inch_x) / columns
        y = box.bottom + (0.1 + NAME_IN * (rows - 1 - place // columns)) * box.inch_y
        box.figure.text(x, y, f"■ {name}", fontsize=6.8, color=colour, va="center")


def _aligned(found: Sequence[Series]) -> tuple[list[float], list[list[float]]]:
    """Values at the times of all of them; 0 where one has none."""
    times = sorted({at for one in found for at in one.times})
    at = [dict(zip(one.times, one.values, strict=True)) for one in found]
    return times, [[0.0 if math.isnan(value := one.get(when, 0.0)) else value for when in times] for one in at]


def _between(low: Sequence[float], high: Sequence[float]) -> list[float]:
    """What is in one bucket, from the counts up to its two bounds."""
    return [max(0.0, upper - lower) for lower, upper in zip(low, high, strict=True)]


def _clock(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S")


def _edges(times: Sequence[float]) -> list[float]:
    step = times[1] - times[0] if len(times) > 1 else 1.0
    return [times[0] - step, *times]


def shown(value: float, unit: str) -> str:
    """A value with its unit, as short as can be."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        for size, word in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= size:
                return f"{value / size:.3g} {word}"
        return "0 s"
    if unit in _BINARY:
        tail = "B/s" if unit == "Bps" else "B"
        for size, word in ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki")):
            if abs(value) >= size:
                return f"{value / size:.3g} {word}{tail}"
        return f"{value:.3g} {tail}"
    tail = {"reqps": "/s", "ops": "/s"}.get(unit, "")
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g} k{tail}"
    return f"{value:.0f}{tail}" if abs(value) >= 1000 else f"{value:.4g}{tail}"


def _make_small(path: Path) -> None:
    """Few colours take little room."""
    from PIL import Image

    with Image.open(path) as whole:
        whole.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

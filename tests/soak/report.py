"""The verdict of a soak and its figures, as text. Pure."""

from collections import Counter
from collections.abc import Sequence

from tests.chaos.cell import STORE
from tests.soak.bounds import BOUNDS, LOG_BYTES_MAX, RECORD_BYTES_MAX
from tests.soak.story import Story
from tests.soak.verdict import HOUR_S, Growth, Verdict, judge_growth, slope_of

#: A process is warm after a third of the soak, and at most after so many seconds.
WARM_SHARE = 1 / 3
WARM_MOST_S = 600.0
#: Records from which the memory of one is told.
RECORDS_MIN = 100
#: A store that has forgotten everything is told again of what ended in the last minute, at most so many requests.
TOLD_AGAIN_MAX = 200
_BYTES_OF_MIB = 1024 * 1024
COLUMNS = ("process", "figure", "unit", "samples", "minutes", "first", "last", "an hour", "surely", "allowed")


def warm_s(story: Story) -> float:
    """When its processes are warm."""
    return min(WARM_MOST_S, story.seconds * WARM_SHARE)


def verdict_of(story: Story) -> Verdict:
    """What grew."""
    return judge_growth(story.series, BOUNDS, warm_s(story))


def faults_of(story: Story, verdict: Verdict) -> list[str]:
    """Everything that is wrong, a sentence each; empty: the soak was clean."""
    found = [*story.wrong, *verdict.findings]
    record_bytes, line_bytes = bytes_of_a_record(story), bytes_of_lines(story)
    if record_bytes is not None and record_bytes > RECORD_BYTES_MAX:
        found.append(f"a record takes {record_bytes:.0f} bytes of the store, at most {RECORD_BYTES_MAX:.0f} are allowed")
    if line_bytes > LOG_BYTES_MAX:
        found.append(f"logs took {line_bytes:.0f} bytes for each request, at most {LOG_BYTES_MAX:.0f} are allowed")
    found += [f"the store has {kept} records at {at_s:.0f} s, of {asked} requests" for at_s, kept, asked in _surplus(story)]
    if not story.outcomes["served"]:
        found.append("no request was served")
    return found


def bytes_of_a_record(story: Story) -> float | None:
    """The slope of the store's memory over its records, of the start that held most; None where it held few."""
    points = max(
        (
            [(one.figures["records"], one.figures["used_mib"] * _BYTES_OF_MIB) for one in samples]
            for name, samples in story.samples.items()
            if name.startswith(STORE)
        ),
        key=lambda points: points[-1][0],
    )
    distinct = list(dict(points).items())
    if distinct[-1][0] - distinct[0][0] < RECORDS_MIN:
        return None
    return slope_of(distinct).median


def bytes_of_lines(story: Story) -> float:
    """Of all logs, for each request."""
    return (story.asked[-1].log_bytes - story.asked[0].log_bytes) / max(1, story.requests)


def _surplus(story: Story) -> list[tuple[float, int, int]]:
    """(seconds, records, requests) where the store has more records than requests can account for."""
    kept = {
        at.at_s: int(at.figures["records"]) for name, all_of in story.samples.items() if name.startswith(STORE) for at in all_of
    }
    asked = {one.at_s: one.since_store for one in story.asked}
    return [(at_s, kept[at_s], asked[at_s]) for at_s in asked if kept[at_s] > asked[at_s] + TOLD_AGAIN_MAX]


def row_of(growth: Growth) -> list[str]:
    """One line of the table. `an hour`: by its slope, for a level what it came to in all."""
    hours = growth.span_s / HOUR_S
    a_rate = growth.bound.way.value == "slope"
    return [
        growth.process,
        growth.bound.figure,
        growth.bound.unit,
        str(growth.samples),
        f"{growth.span_s / 60:.0f}",
        f"{growth.first:.1f}",
        f"{growth.last:.1f}",
        f"{growth.grown / hours:+.1f}" if a_rate else f"{growth.grown:+.1f} in all",
        f"{growth.surely / hours:+.1f}" if a_rate else f"{growth.surely:+.1f} in all",
        f"{growth.most / hours:.1f}" if a_rate else f"{growth.most:.1f} in all",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(story: Story, verdict: Verdict) -> str:
    """Counts, the table of the processes that are as old as the soak, and what is wrong."""
    eldest = [growth for growth in verdict.growths if growth.process in story.eldest]
    others = len({growth.process for growth in verdict.growths} - set(story.eldest))
    one = bytes_of_a_record(story)
    record = "-" if one is None else f"{one:.0f}"
    peaks = ", ".join(f"{name} {story.peaks[name]:.0f}" for name in story.eldest if name in story.peaks)
    faults = faults_of(story, verdict)
    parts = [
        f"{story.waves} waves in {story.seconds / 60:.1f} minutes: {story.requests} requests, {story.tokens} tokens told.",
        f"Ends: {_counts(story.outcomes)}.",
        f"Faults: {_counts(story.faults) or 'none'}; {len(story.samples)} incarnations.",
        f"Bytes of logs for a request: {bytes_of_lines(story):.0f}. Bytes of a record: {record}.",
        f"Most memory while working, MiB: {peaks}.",
        f"Warm after {warm_s(story):.0f} s. Processes that lived all through ({others} others were judged too):",
        table([row_of(growth) for growth in eldest]),
        f"{len(faults)} faults." if faults else "Clean: nothing grew, every request ended rightly, everything came back.",
        *faults,
    ]
    return "\n\n".join(parts)


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.most_common())

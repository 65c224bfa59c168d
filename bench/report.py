"""From measured runs to a table, with the machine and the versions beside it."""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.measured import Measured
from tandem_cli.load.tables import Tabled

COLUMNS = (
    "load",
    "mode",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "inter-token p50 ms",
    "inter-token p99 ms",
    "output tokens/s",
    "hand-over MB/request",
    "hand-over ms (p50)",
    "not hidden ms (p50)",
    "not hidden share of TTFT",
    "disturbed runs",
)


@dataclass(frozen=True, slots=True)
class ModeRun:
    """One measured run of one mode. sent_bytes: bytes handed over in it, from the prefill member's metrics."""

    mode: str
    measured: Measured
    sent_bytes: float


def machine() -> str:
    """CPU, cores, memory, versions, in one line."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in names if line.startswith("model name")), platform.processor())
    cores = sum(line.startswith("processor") for line in names)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "nixl", "grpcio"))
    return f"{cpu}, {cores} cores, Python {platform.python_version()}, {versions}"


def row(level: str, mode: str, runs: Sequence[ModeRun]) -> list[str]:
    """Medians over the rounds of one mode at one level."""

    def median(figure: Callable[[ModeRun], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    first_s = median(lambda run: run.measured.first_token_s(0.5))
    exposed_s = median(lambda run: run.measured.phase_s("handover_exposed_s", 0.5))
    handover = median(lambda run: run.sent_bytes / len(run.measured.requests) / 1e6)
    split = handover > 0
    return [
        level,
        mode,
        f"{first_s * 1e3:.0f}",
        f"{median(lambda run: run.measured.first_token_s(0.99)) * 1e3:.0f}",
        f"{median(lambda run: run.measured.gap_s(0.5)) * 1e3:.1f}",
        f"{median(lambda run: run.measured.gap_s(0.99)) * 1e3:.1f}",
        f"{median(lambda run: run.measured.output_tokens_per_s):.1f}",
        f"{handover:.2f}" if split else "-",
        f"{median(lambda run: run.measured.phase_s('handover_s', 0.5)) * 1e3:.1f}" if split else "-",
        f"{exposed_s * 1e3:.1f}" if split else "-",
        f"{exposed_s / first_s:.1%}" if split and first_s else "-",
        f"{sum(run.measured.disturbance.disturbed for run in runs)} of {len(runs)}",
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table of the modes as Markdown."""
    return table(COLUMNS, rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    return Tabled(columns, rows).markdown()


def write_between(path: Path, marker: str, text: str) -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- /marker -->` in a file."""
    old = path.read_text()
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, rest = old.split(start, 1)
    tail = rest.split(end, 1)[1]
    path.write_text(f"{head}{start}\n{text}\n{end}{tail}")

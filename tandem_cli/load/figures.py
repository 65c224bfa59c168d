"""Figures of one level of load, for people and for scripts. Pure."""

from collections.abc import Sequence
from typing import Any

from tandem_cli.load.measured import Measured
from tandem_cli.load.tables import Tabled
from tandem_cli.load.workload import Level

COLUMNS = (
    "load",
    "requests",
    "failed",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "inter-token p50 ms",
    "inter-token p99 ms",
    "output tokens/s",
    "requests/s",
)
CANCEL_COLUMNS = ("cancelled", "cancel p50 ms", "cancel p99 ms")


def figures(level: Level, measured: Measured) -> dict[str, Any]:
    """One level as a script has it. Times are milliseconds; quantiles are by nearest rank, None where nothing is to be told."""
    counted, cancelled = measured.counted(), measured.cancelled()

    def two(told: bool, quantile_s: Any) -> dict[str, float | None]:
        return {name: round(quantile_s(share) * 1e3, 3) if told else None for name, share in (("p50", 0.5), ("p99", 0.99))}

    return {
        "loop": level.loop.value,
        "level": level.value,
        "seconds": round(measured.seconds, 3),
        "requests": len(measured.requests),
        "ended": len(counted),
        "cancelled": len(cancelled),
        "failed": len(measured.failures()),
        "failures": measured.failures_by_reason(),
        "first_token_ms": two(bool(counted), measured.first_token_s),
        "inter_token_ms": two(any(one.gaps_s() for one in counted), measured.gap_s),
        "cancel_ms": two(bool(cancelled), measured.cancel_s),
        "output_tokens_per_s": round(measured.output_tokens_per_s, 3),
        "requests_per_s": round(len(counted) / measured.seconds, 3),
    }


def level_table(levels: Sequence[tuple[Level, dict[str, Any]]]) -> Tabled:
    """All levels; the columns of cancels only where there were some."""
    cancels = any(one["cancelled"] for _, one in levels)
    rows = []
    for level, one in levels:
        times = [_ms(one[name][share]) for name in ("first_token_ms", "inter_token_ms") for share in ("p50", "p99")]
        cells = [str(level), str(one["requests"]), str(one["failed"]), *times]
        cells += [f"{one['output_tokens_per_s']:.1f}", f"{one['requests_per_s']:.2f}"]
        if cancels:
            cells += [str(one["cancelled"]), *(_ms(one["cancel_ms"][share]) for share in ("p50", "p99"))]
        rows.append(cells)
    return Tabled((*COLUMNS, *(CANCEL_COLUMNS if cancels else ())), rows)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

"""What a check comes to. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Result(Enum):
    """How a check ended. Only `FAILS` makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILS = "fails"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it is, and what to change, empty when nothing is."""

    check: str
    result: Result
    finding: str
    change: str = ""

    def as_dict(self) -> dict[str, str]:
        """For scripts."""
        return {"check": self.check, "result": self.result.value, "finding": self.finding, "change": self.change}


def ok(check: str, finding: str) -> Finding:
    """All is well."""
    return Finding(check, Result.OK, finding)


def warning(check: str, finding: str, change: str) -> Finding:
    """It works, and could be better or safer."""
    return Finding(check, Result.WARNING, finding, change)


def fails(check: str, finding: str, change: str) -> Finding:
    """A cell does not run so."""
    return Finding(check, Result.FAILS, finding, change)


def skipped(check: str, finding: str, change: str = "") -> Finding:
    """It could not be looked at, or nobody asked for it."""
    return Finding(check, Result.SKIPPED, finding, change)


def any_fails(findings: Iterable[Finding]) -> bool:
    """Whether something has to be changed."""
    return any(one.result is Result.FAILS for one in findings)

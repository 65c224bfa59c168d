"""Known faults in what is installed: `python -m tools.audit`, with pip-audit and the advisories of the Python package index.

pip-audit has an environment of its own, .venv-audit: what it needs changes nothing of what it looks at.

1: there are some without a reason in tools/audit_ignored.toml, or a reason there is out of date. 0: none, or the advisories
cannot be had now, which is said: a network that is away is no fault of a commit.
"""

import datetime
import json
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORED = Path(__file__).with_name("audit_ignored.toml")
ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv-audit"
AUDITOR = "pip-audit>=2.9,<3"
#: Seconds for all answers together, and for making the environment.
AUDIT_S = 50.0


@dataclass(frozen=True, slots=True)
class Ignored:
    """A fault that does not touch us: why, and until when that is believed."""

    id: str
    package: str
    reason: str
    until: datetime.date


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said, and whether it is a failure."""

    lines: tuple[str, ...]
    failed: bool


def ignored_in(text: str) -> tuple[Ignored, ...]:
    """The entries of the file. Raises ValueError for one that does not say all."""
    found = []
    for number, entry in enumerate(tomllib.loads(text).get("ignored", [])):
        try:
            one = Ignored(**entry)
        except TypeError:
            raise ValueError(f"ignored[{number}] must say id, package, reason and until, and nothing else") from None
        if not one.reason.strip() or type(one.until) is not datetime.date:
            raise ValueError(f"ignored[{number}] needs a reason, and a date in until")
        found.append(one)
    return tuple(found)


def judge(report: Any, ignored: Sequence[Ignored], today: datetime.date) -> Verdict:
    """What a report of pip-audit comes to."""
    dependencies = report["dependencies"]
    audited = [one for one in dependencies if "vulns" in one]
    if not audited:
        return Verdict(("==> not audited: the advisories know none of what is installed; is this index a copy?",), False)
    believed = {(one.package, name) for one in ignored if today <= one.until for name in (one.id,)}
    lines, failed, met = [], False, set()
    for one in audited:
        for fault in one["vulns"]:
            names = (fault["id"], *fault.get("aliases", ()))
            known = {(one["name"], name) for name in names} & believed
            met |= known
            failed |= not known
            mended = ", ".join(fault.get("fix_versions", ())) or "no version yet"
            state = "ignored" if known else "FAULT"
            lines.append(f"{state}: {one['name']} {one['version']}: {' '.join(names)}; mended in {mended}")
    for entry in ignored:
        if today > entry.until:
            failed = True
            lines.append(f"OUT OF DATE since {entry.until}: the reason for {entry.package} {entry.id}")
        elif (entry.package, entry.id) not in met:
            lines.append(f"not needed any more: the reason for {entry.package} {entry.id}")
    skipped = len(dependencies) - len(audited)
    lines.append(f"==> {len(audited)} packages audited, {skipped} not known to the advisories")
    return Verdict(tuple(lines), failed)


class NotAudited(Exception):
    """Nobody could be asked."""


def _report() -> Any:
    """What pip-audit says of this environment. Raises NotAudited."""
    python, due = ENVIRONMENT / "bin" / "python", time.monotonic() + AUDIT_S
    if not python.exists():
        _said_by([sys.executable, "-m", "venv", str(ENVIRONMENT)], due)
    _said_by([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", AUDITOR], due)
    here = sysconfig.get_path("purelib")
    said = _said_by([str(python), "-m", "pip_audit", "--path", here, "--format", "json", "--progress-spinner", "off"], due)
    try:
        return json.loads(said.stdout)
    except ValueError:
        raise NotAudited(f"the advisories cannot be reached: {_last_line(said)}") from None


def _said_by(command: Sequence[str], due: float) -> "subprocess.CompletedProcess[str]":
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.1, due - time.monotonic()), check=False)
    except subprocess.TimeoutExpired:
        raise NotAudited(f"no answer within {AUDIT_S:g} s") from None
    if done.returncode and "pip_audit" not in command:  # which says with 1 that there are faults
        raise NotAudited(f"pip-audit cannot be installed: {_last_line(done)}")
    return done


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr.strip().splitlines() or ["no word"])[-1][:200]


def main() -> int:
    """Asks, judges, says."""
    ignored = ignored_in(IGNORED.read_text(encoding="utf-8"))
    try:
        report = _report()
    except NotAudited as why:
        print(f"==> not audited: {why}")
        return 0
    verdict = judge(report, ignored, datetime.datetime.now(datetime.UTC).date())
    print(*verdict.lines, sep="\n")
    return int(verdict.failed)


if __name__ == "__main__":
    sys.exit(main())

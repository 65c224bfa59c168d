"""docs/failure-modes.md names the tests that show each line; they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failure-modes.md").read_text()


def test_every_named_test_exists() -> None:
    written = {
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named, "no test is named"
    assert not named - written, f"these are not there: {sorted(named - written)}"


def test_every_line_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    assert rows
    assert not [line[:80] for line in rows if "`test_" not in line]


def test_every_setting_that_is_named_is_one() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text()
    named = set(re.findall(r"\{(\w+)\}", PAGE))
    assert not [name for name in named if not re.search(rf"`([\w.:]+[.:])?{name}`", limits)]

"""What `make audit` makes of a report and of the reasons to ignore a fault."""

import datetime

import pytest

from tools.audit import IGNORED, Ignored, ignored_in, judge

TODAY = datetime.date(2027, 1, 1)
SOUND = {"name": "sound", "version": "1.0", "vulns": []}
FAULTY = {
    "name": "faulty",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}],
}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


def reason(id: str = "PYSEC-1", until: datetime.date = TODAY) -> Ignored:
    return Ignored(id, "faulty", "it is not called here", until)


def test_a_fault_fails_and_says_where_it_is_mended():
    verdict = judge({"dependencies": [SOUND, FAULTY, UNKNOWN]}, (), TODAY)
    assert verdict.failed
    assert verdict.lines == (
        "FAULT: faulty 2.0: PYSEC-1 CVE-1; mended in 2.1",
        "==> 2 packages audited, 1 not known to the advisories",
    )


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-1"])
def test_a_fault_with_a_reason_passes_until_its_day(name):
    assert not judge({"dependencies": [FAULTY]}, (reason(name),), TODAY).failed
    late = judge({"dependencies": [FAULTY]}, (reason(name, TODAY - datetime.timedelta(1)),), TODAY)
    assert late.failed and any(line.startswith("OUT OF DATE") for line in late.lines)


def test_a_reason_counts_for_its_package_alone_and_is_told_when_it_is_not_needed():
    other = Ignored("PYSEC-1", "other", "it is not called here", TODAY)
    verdict = judge({"dependencies": [FAULTY]}, (other,), TODAY)
    assert verdict.failed and "not needed any more: the reason for other PYSEC-1" in verdict.lines


def test_advisories_that_know_nothing_are_no_audit():
    verdict = judge({"dependencies": [UNKNOWN]}, (), TODAY)
    assert not verdict.failed and verdict.lines[0].startswith("==> not audited")


def test_reasons_say_all():
    assert ignored_in(IGNORED.read_text()) == ()
    said = '[[ignored]]\nid = "X"\npackage = "p"\nreason = "r"\nuntil = 2030-01-01\n'
    assert ignored_in(said)[0].until == datetime.date(2030, 1, 1)
    for wrong in (said.replace('reason = "r"\n', ""), said.replace('"r"', '" "'), said.replace("2030-01-01", '"never"')):
        with pytest.raises(ValueError, match=r"ignored\[0\]"):
            ignored_in(wrong)

"""The Debian packages that tests need: installed where that may be done, told where not, never in the way."""

import os
import subprocess
from pathlib import Path

import pytest

PACKAGES = "spin gcc libc6-dev iproute2 prometheus"
SCRIPT = Path(__file__).parents[2] / "tools" / "system_packages.sh"


@pytest.fixture
def run(tmp_path):
    """Runs the script with programs of our own for apt-get, dpkg-query and id; returns exit status, words, calls of apt-get."""
    calls = tmp_path / "calls"

    def ran(*, installed: bool, root: bool, apt_fails: bool = False) -> tuple[int, str, list[str]]:
        programs = {
            "apt-get": f'echo "$@" >> {calls}; echo "E: no network" >&2; exit {int(apt_fails)}',
            "dpkg-query": "echo 'install ok installed'" if installed else "exit 1",
            "id": f"echo {0 if root else 1000}",
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            ["sh", str(SCRIPT)],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []

    return ran


def test_nothing_is_done_when_all_is_there(run) -> None:
    assert run(installed=True, root=True) == (0, "", [])


def test_root_gets_what_is_missing(run) -> None:
    code, said, calls = run(installed=False, root=True)
    assert (code, said) == (0, "==> installing spin gcc libc6-dev iproute2 chromium prometheus (apt-get)\n")
    assert [call.split()[2] for call in calls] == ["update", "install"]
    assert calls[1].endswith("spin gcc libc6-dev iproute2 chromium prometheus")


def test_others_are_told_what_to_do(run) -> None:
    code, said, calls = run(installed=False, root=False)
    assert (code, calls) == (0, [])
    assert said.strip().endswith(
        "the tests that need them skip. To have them: sudo apt-get install spin gcc libc6-dev iproute2 chromium prometheus"
    )


def test_a_failure_is_told_and_stops_nothing(run) -> None:
    code, said, _ = run(installed=False, root=True, apt_fails=True)
    assert code == 0
    assert (
        "could not install spin gcc libc6-dev iproute2 chromium prometheus; the tests that need them skip" in said
        and "E: no network" in said
    )

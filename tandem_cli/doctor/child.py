"""Measurements that need what the command line must not import: a module of another package, run as a process, tells JSON."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
WORDS_MAX = 400


class ChildFailed(Exception):
    """A measurement did not end. The message says why."""


def measured(kind: type[T], argv: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> T:
    """What `python -m argv…` found. It has limit_s seconds, then it is killed. Raises ChildFailed.

    environment: added to this process's; what nobody else shall read in a list of processes goes here.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", *argv],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"python -m {argv[0]} did not end within {limit_s:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:WORDS_MAX]
        raise ChildFailed(f"python -m {argv[0]} ended with {done.returncode}: {last}")
    try:
        return msgspec.json.decode(lines[-1], type=kind)
    except msgspec.DecodeError as error:
        raise ChildFailed(f"python -m {argv[0]} said something else: {error}") from error

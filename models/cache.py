"""The cache folder: where it is, files that appear whole or not at all, and one writer at a time."""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import PullFailed
from models.ref import PullProgress, Report

CACHE_VARIABLE = "TANDEM_CACHE"
LOCK_WAIT_LIMIT_S = 3600.0
_LOCK_POLL_S = 0.2


def cache_folder(cache: Path | None = None) -> Path:
    """The given folder, or $TANDEM_CACHE, or ~/.cache/tandem. It need not exist."""
    if cache is not None:
        return cache
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "tandem"


def write_whole(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old one or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are readable by their owner alone, and one user may pull for another.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class LockHeld(TimeoutError):
    """Another process kept a lock file for longer than was waited."""

    def __init__(self, path: Path, waited_s: float) -> None:
        super().__init__(f"another process has held {path} for {waited_s:g} s")


@contextmanager
def only_holder(path: Path, wait_limit_s: float, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `path` among processes and threads. The system frees it when its holder dies.

    waiting: called again and again until it is ours. Raises LockHeld after `wait_limit_s`, and OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = time.monotonic() + wait_limit_s
        while not _locked(file.fileno()):
            if time.monotonic() >= deadline:
                raise LockHeld(path, wait_limit_s)
            waiting()
            time.sleep(_LOCK_POLL_S)
        yield


@contextmanager
def only_writer(path: Path, report: Report, wait_limit_s: float = LOCK_WAIT_LIMIT_S) -> Iterator[None]:
    """One pull of a model at a time. Raises PullFailed after `wait_limit_s`."""
    try:
        with only_holder(path, wait_limit_s, lambda: report(PullProgress("waiting for another pull of this model", 0, None))):
            yield
    except LockHeld as held:
        raise PullFailed(f"Another process has held {path} for {wait_limit_s:g} s. End it, then pull again.") from held


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

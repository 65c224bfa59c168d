"""Files that are read again when they change, such as certificates and tokens: what was read last counts until then."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds between two looks at a file: a change is seen that much later at most.
LOOK_S = 1.0
#: Most bytes of one file.
FILE_MAX_BYTES = 16 * 1024 * 1024

_LOG = logging.getLogger("files")


class BadFile(ValueError):
    """A file that cannot be read or holds something else than it should. Names the setting, and nothing of its content."""


class WatchedFiles(Generic[T]):
    """What `load` makes of some files. `paths`: by the setting that names each.

    When one has changed all are read again. What cannot be read then is told in the log, and the value before it stays. May
    be used by any thread.
    """

    def __init__(self, paths: Mapping[str, str], load: Callable[[Mapping[str, bytes]], T], look_s: float = LOOK_S) -> None:
        """Reads all. Raises BadFile, as `load` does."""
        self._paths = dict(paths)
        self._load = load
        self._look_s = look_s
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._value = self._read()
        self._look_at = time.monotonic() + look_s

    def current(self) -> T:
        """The value of now: the same object until a file changes."""
        with self._lock:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + self._look_s
                self._look()
            return self._value

    def _look(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._value = self._read()
        except BadFile as bad:
            _LOG.error("%s; what was read before stays in use", bad)
        else:
            _LOG.info("read again: %s", ", ".join(self._paths))
        if self._signature() != signature:  # it was being written: look once more
            self._seen = ()

    def _read(self) -> T:
        return self._load({setting: _content(setting, path) for setting, path in self._paths.items()})

    def _signature(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in self._paths.values():
            try:
                seen = os.stat(path)
                found.append((seen.st_mtime_ns, seen.st_ino, seen.st_size))
            except OSError as error:
                found.append(error.errno)
        return tuple(found)


def _content(setting: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise BadFile(f"{setting}: {path} cannot be read: {error.strerror}") from None
    if len(content) > FILE_MAX_BYTES:
        raise BadFile(f"{setting}: {path} has more than {FILE_MAX_BYTES} bytes")
    return content

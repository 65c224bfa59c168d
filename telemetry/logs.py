"""Log lines that carry the request they belong to; never the text of a prompt or an answer.

Lines are written by a thread of their own out of a bounded queue: a full pipe behind stderr delays no step. Lines that
found no room are counted, and the count is logged once there is room.
"""

import json
import logging
import logging.handlers
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TextIO

from telemetry.tracing import trace_id_of

#: Most lines that wait to be written.
QUEUE_LINES = 8192
#: Most characters of one value or message; a traceback may have ten times that.
VALUE_CHARS = 2000
#: A library's line with the same wording is written once in that many seconds.
REPEAT_S = 60.0
#: Loggers that repeat themselves while something is away, or whenever a client leaves in the middle of a stream.
REPEATING = ("opentelemetry", "grpc")
#: Names of fields that hold what users wrote or got; their values are never written.
PRIVATE = frozenset({"prompt", "text", "content", "messages", "output", "completion"})

#: Fields of a record that are no values of a line: what logging puts there, and uvicorn's message again for terminals.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


@dataclass(frozen=True, slots=True)
class Bound:
    """What every line of the present task carries."""

    request_id: str = ""
    attempt: int = 0
    trace_id: str = ""


_NOTHING = Bound()
_BOUND: ContextVar[Bound] = ContextVar("tandem_log_bound", default=_NOTHING)


def bind(request_id: str | None = None, attempt: int | None = None, traceparent: str | None = None) -> None:
    """Let every line of this task, from here on, carry these. What is not given stays.

    An RPC runs in a task of its own, so nothing needs to be taken back at its end.
    """
    _BOUND.set(_changed(request_id, attempt, traceparent))


@contextmanager
def bound(request_id: str | None = None, attempt: int | None = None, traceparent: str | None = None) -> Iterator[None]:
    """As `bind`, for the lines of a block."""
    token = _BOUND.set(_changed(request_id, attempt, traceparent))
    try:
        yield
    finally:
        _BOUND.reset(token)


def current() -> Bound:
    """What lines of this task carry now."""
    return _BOUND.get()


class Logs:
    """The log output of a process. `close` writes what waits."""

    def __init__(self, handler: "_QueueHandler", listener: logging.handlers.QueueListener) -> None:
        self._handler = handler
        self._listener = listener
        self._closed = False

    @property
    def dropped(self) -> int:
        """Lines that found no room since the start."""
        return self._handler.dropped

    def close(self) -> None:
        """Write what waits and take the handler off the root logger. Closing twice is ignored."""
        if not self._closed:
            self._closed = True
            logging.getLogger().removeHandler(self._handler)
            self._listener.stop()


def setup_logging(
    service: str, level: str = "INFO", json: bool = True, stream: TextIO | None = None, queue_lines: int = QUEUE_LINES
) -> Logs:
    """Send the root logger's lines to `stream` (None: stderr) as JSON lines, or as text for people.

    Raises ValueError when `level` is none of DEBUG, INFO, WARNING, ERROR, CRITICAL.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level is {level!r}; it must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    output = logging.StreamHandler(stream if stream is not None else sys.stderr)
    output.setFormatter(JsonFormatter(service) if json else HumanFormatter())
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(queue_lines)
    handler = _QueueHandler(waiting)
    handler.addFilter(_RepeatFilter())
    listener = _QueueListener(waiting, output, handler)
    listener.start()
    root = logging.getLogger()
    root.setLevel(number)
    root.addHandler(handler)
    return Logs(handler, listener)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp, level, logger, service, message, request_id, attempt, trace_id, other fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "service": self._service,
            "message": _cut(record.getMessage(), VALUE_CHARS),
        }
        line.update(_fields(record))
        if record.exc_text:
            line["exception"] = _cut(record.exc_text, 10 * VALUE_CHARS)
        return json.dumps(line, ensure_ascii=False, default=str)


class HumanFormatter(logging.Formatter):
    """Time, level, message and fields, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items() if name != "trace_id")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<7} {_cut(record.getMessage(), VALUE_CHARS)}" + (f"  [{fields}]" if fields else "")
        return f"{line}\n{record.exc_text}" if record.exc_text else line


class _QueueHandler(logging.handlers.QueueHandler):
    """Takes a line without waiting, with what is bound in the task that logs."""

    def __init__(self, waiting: "queue.Queue[logging.LogRecord]") -> None:
        super().__init__(waiting)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        now = _BOUND.get()
        prepared = logging.makeLogRecord(vars(record))
        if record.exc_info and not record.exc_text:
            prepared.exc_text = logging.Formatter().formatException(record.exc_info)
        prepared.msg, prepared.args, prepared.exc_info = record.getMessage(), None, None
        for name, value in (("request_id", now.request_id), ("attempt", now.attempt), ("trace_id", now.trace_id)):
            if value and name not in vars(prepared):
                setattr(prepared, name, value)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _QueueListener(logging.handlers.QueueListener):
    """Writes lines, and says how many were lost."""

    def __init__(self, waiting: "queue.Queue[logging.LogRecord]", output: logging.Handler, source: _QueueHandler) -> None:
        super().__init__(waiting, output)
        self._source = source
        self._told = 0

    def handle(self, record: logging.LogRecord) -> None:
        lost = self._source.dropped - self._told
        if lost:
            self._told += lost
            said = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "lost_lines": lost}
            super().handle(logging.makeLogRecord({**said, "msg": f"{lost} log lines were lost: the reader of the log is slow"}))
        super().handle(record)

    def enqueue_sentinel(self) -> None:
        # The library puts the sentinel without waiting and would raise when the queue is full.
        self.queue.put(None)  # type: ignore[attr-defined]


class _RepeatFilter(logging.Filter):
    """Lets a repeating library's line through once in REPEAT_S."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._written_at: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(REPEATING):
            return True
        key, now = (record.name, record.msg), time.monotonic()
        with self._lock:
            if now - self._written_at.get(key, -REPEAT_S) < REPEAT_S:
                return False
            if len(self._written_at) >= 256:
                self._written_at.clear()
            self._written_at[key] = now
        return True


def _changed(request_id: str | None, attempt: int | None, traceparent: str | None) -> Bound:
    changed = _BOUND.get()
    if request_id is not None:
        changed = replace(changed, request_id=request_id)
    if attempt is not None:
        changed = replace(changed, attempt=attempt)
    if traceparent is not None:
        changed = replace(changed, trace_id=trace_id_of(traceparent))
    return changed


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in ("request_id", "attempt", "trace_id"):
        value = vars(record).get(name)
        if value:
            found[name] = value
    for name, value in vars(record).items():
        if name in _STANDARD or name in found:
            continue
        if name in PRIVATE:
            found[name] = "not logged"
        elif isinstance(value, bool | int | float) or value is None:
            found[name] = value
        else:
            found[name] = _cut(str(value), VALUE_CHARS)
    return found


def _timestamp(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}Z"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"

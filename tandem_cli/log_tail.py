"""The end of a process's log, for people: JSON lines are turned into plain ones."""

import json
from pathlib import Path

LINES = 20
#: More than LINES lines of any length that helps.
BYTES = 64 * 1024


def tail(log: Path) -> str:
    """The last lines of a log; says so when there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(the log cannot be read: {error.strerror})"
    lines = [plain for line in text.splitlines() for plain in plain_lines(line)]
    return "\n".join(f"  {line}" for line in lines[-LINES:]) or "  (it wrote nothing)"


def plain_lines(line: str) -> list[str]:
    """A log line as time, level, message and the end of the exception that it carries; anything else as it is."""
    try:
        entry = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(entry, dict) or "message" not in entry:
        return [line]
    time = str(entry.get("timestamp", "")).partition("T")[2].removesuffix("Z")
    head = f"{time} {entry.get('level', '')} {entry['message']}".strip()
    return [head, *str(entry.get("exception", "")).splitlines()]

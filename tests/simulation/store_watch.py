"""What is looked at when the store runs a script, and commands that are late on purpose."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: A record, as the hash that it is; None when there is none.
Record = dict[str, str] | None

_ENDED = frozenset({"finished", "cancelled", "failed"})


class Late(Enum):
    """What is late about a command."""

    ANSWER = "answer"
    """Its router stops when the store has carried it out."""
    COMMAND = "command"
    """Its router stops when it is on its way, and it arrives as late as the router goes on, or a little before."""
    STRAY = "stray"
    """It is stuck on its way: its router asks again, and it arrives after all that."""


@dataclass(slots=True)
class Trap:
    """Waits for the next run of `script` that process `name` asks for. `late_s`: by how much that one comes late."""

    name: str
    script: str
    late: Late
    late_s: float
    spring: Callable[[], None] = field(default=lambda: None)


@dataclass(slots=True)
class Traps:
    """Those that wait."""

    waiting: list[Trap] = field(default_factory=list)

    def caught(self, name: str, script: str) -> Trap | None:
        """The trap that a command falls into; it is gone then."""
        found = next((trap for trap in self.waiting if (trap.name, trap.script) == (name, script)), None)
        if found is not None:
            self.waiting.remove(found)
        return found


class RecordWatch:
    """A second look at each write of a record, by rules that are far simpler than the scripts.

    A live record changes hands only when the lease of who had it has run out; the writes of one owner come in order; attempts
    count up; an end is the end.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found

    def look(self, script: str, before: Record, after: Record, lease: Callable[[str], float | None], now: float) -> None:
        """`lease`: when a router's lease ends, None without one."""
        if before is None or after is None or before == after:
            return
        name = before["request_id"]
        if before["state"] in _ENDED:
            if (before["state"], before["ending"]) != (after["state"], after["ending"]):
                self._found(f"{name} had ended {before['state']} and {script} made it {after['state']}")
            return
        until = lease(before["router"])
        lives = until is not None and until > now
        if before["router"] != after["router"]:
            if script != "adopt" or lives:
                self._found(f"{name} of {before['router']}, which {'lives' if lives else 'is dead'}, was taken by {script}")
        elif script == "reap" and lives:
            self._found(f"{name} of {before['router']}, which lives, was ended for dead")
        elif int(after["revision"]) < int(before["revision"]):
            self._found(f"{name}: {script} carried out a write that was overtaken")
        if int(after["attempt"]) < int(before["attempt"]):
            self._found(f"{name}: {script} went back from attempt {before['attempt']} to {after['attempt']}")


def no_watch(script: str, before: Any, after: Any, lease: Any, now: float) -> None:
    """Nobody looks."""

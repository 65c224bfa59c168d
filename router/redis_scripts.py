"""The Lua scripts of the store, with the lifecycle's table put before each: the table exists once."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from lifecycle.states import TABLE, TERMINAL
from router.budget import Resource

NAMES = (
    *("create", "admit", "begin", "advance", "assert_live", "request_cancel", "finish"),
    *("heartbeat", "settled", "owner", "lapsed", "adopt", "reap", "forget", "sweep"),
    *("overview", "outlines", "totals"),
)
#: Functions that several scripts use, put before those.
PARTS = {
    "create": ("memory", "creating"),
    "admit": ("placing",),
    "begin": ("memory", "creating", "placing"),
    **dict.fromkeys(("heartbeat", "settled"), ("memory",)),
}


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it is sent; the server knows it by `sha` once it has seen it."""

    name: str
    text: str
    sha: str


def rules() -> str:
    """Lua source of the tables EDGES and TERMINAL, made from the lifecycle's table."""
    edges: dict[str, list[str]] = {}
    for (state, event), target in TABLE.items():
        edges.setdefault(state.value, []).append(f"{event.value} = '{target.value}'")
    rows = ", ".join(f"{state} = {{ {', '.join(events)} }}" for state, events in edges.items())
    ends = ", ".join(f"{state.value} = true" for state in sorted(TERMINAL, key=lambda state: state.value))
    return f"local EDGES = {{ {rows} }}\nlocal TERMINAL = {{ {ends} }}\nlocal TOKENS = '{Resource.TOKENS.value}:'\n"


@cache
def script(name: str) -> Script:
    """The script `name`, one of NAMES, read from the package."""
    folder = resources.files("router") / "scripts"
    files = ("prelude", *PARTS.get(name, ()), name)
    text = rules() + "".join((folder / f"{file}.lua").read_text(encoding="utf-8") for file in files)
    # The protocol names scripts by SHA-1; nothing secret hangs on it.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

"""`tandem top` on a terminal: it fills the screen, follows its size, waits for a router that goes, and leaves with q."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.redis_server import cell, redis_url
from tests.router_world import World, router_world
from tests.waiting import until

__all__ = ["cell", "redis_url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: Starts the screen that full-screen programs draw on, and leaves it.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
#: Every picture begins in the corner.
HOME = "\x1b[H"
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """A command on a terminal of its own. `written`: what it wrote since what was waited for last."""

    process: asyncio.subprocess.Process
    file: int
    settings: list[object]
    written: str = ""

    async def shows(self, words: str, timeout_s: float = 60.0) -> None:
        """Waits until it has written these words since the last time."""

        async def told() -> bool:
            self.read()
            return words in self.written

        await until(told, timeout_s, f"{words!r} in {self.written[-2000:]!r}")
        self.written = self.written.partition(words)[2]

    def read(self) -> None:
        """Takes what it has written by now."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.written += os.read(self.file, 65536).decode(errors="replace")

    async def end(self, timeout_s: float = 60.0) -> int:
        """Its exit status."""
        code = await asyncio.wait_for(self.process.wait(), timeout_s)
        self.read()
        return code

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@asynccontextmanager
async def top(world: World, rows: int = 40, columns: int = 160) -> AsyncIterator[Terminal]:
    frame = world.routers[0].frame
    assert frame is not None
    mine, its = pty.openpty()
    settings = termios.tcgetattr(its)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "top", "--period", "0.2", "--address", frame.address),
        **dict.fromkeys(("stdin", "stdout", "stderr"), its),
        # Its size is the terminal's, not what somebody named for the tests.
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.set_blocking(mine, False)
    terminal = Terminal(process, mine, settings)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(its)
        os.close(mine)


async def test_q_leaves_a_terminal_as_it_was(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=3) as world, top(world) as terminal:
        await terminal.shows(ENTER)
        await terminal.shows("decode-2")
        await terminal.shows("0 running")
        os.write(terminal.file, b"q")
        assert await terminal.end() == 0
        assert LEAVE in terminal.written and termios.tcgetattr(terminal.file) == terminal.settings


async def test_a_router_that_goes_is_waited_for_and_the_size_is_followed(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world, top(world) as terminal:
        await terminal.shows("decode-0")
        terminal.size(20, 60)

        async def narrow() -> bool:
            terminal.read()
            pictures = terminal.written.split(HOME)
            return len(pictures) > 2 and all(len(line) <= 60 for line in _SEQUENCES.sub("", pictures[-2]).splitlines())

        await until(narrow, 30, "a picture of the new size")
        await world.routers[0].drain()
        await world.routers[0].close()
        await terminal.shows("trying again")
        terminal.process.send_signal(2)
        assert await terminal.end() == 0

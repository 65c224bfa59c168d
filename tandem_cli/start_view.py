"""Shows how the start of a cell goes on: a table that is redrawn on a terminal, a few plain lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

#: Without a terminal: a line about what is still awaited is written that often.
STILL_EVERY_S = 10.0


@dataclass(slots=True)
class _Row:
    words: str
    address: str = ""
    started_at: float = field(default_factory=time.monotonic)
    took_s: float = 0.0


class TerminalView:
    """Implements StartView with one line for each process."""

    def __init__(self, console: Console) -> None:
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots")
        self._live = Live(
            console=console, refresh_per_second=8, get_renderable=self._table, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> "TerminalView":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def starting(self, names: Sequence[str], words: str) -> None:
        for name in names:
            self._rows[name] = _Row(words)

    def ready(self, name: str, address: str) -> None:
        row = self._rows[name]
        row.address, row.took_s = address, time.monotonic() - row.started_at

    def tick(self) -> None:
        """Redrawn by its own clock."""

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
        now = time.monotonic()
        for name, row in self._rows.items():
            if row.address:
                table.add_row("[green]✓[/]", name, f"ready at {row.address}", f"{row.took_s:.1f} s")
            else:
                table.add_row(self._spinner, name, row.words, f"{now - row.started_at:.1f} s")
        return table


class LineView:
    """Implements StartView with a line for each thing that happens, and one now and then when nothing does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: dict[str, str] = {}
        self._began = self._written_at = time.monotonic()

    def __enter__(self) -> "LineView":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def starting(self, names: Sequence[str], words: str) -> None:
        self._waiting |= dict.fromkeys(names, words)
        self._write(f"{words}: {', '.join(names)}")

    def ready(self, name: str, address: str) -> None:
        del self._waiting[name]
        self._write(f"{name} is ready at {address}")

    def tick(self) -> None:
        if time.monotonic() - self._written_at >= STILL_EVERY_S:
            self._write(f"still {', '.join(sorted(set(self._waiting.values())))}: {', '.join(self._waiting)}")

    def _write(self, words: str) -> None:
        self._written_at = time.monotonic()
        self._console.print(f"  {words}  ({self._written_at - self._began:.1f} s)", markup=False)


def start_view(console: Console) -> TerminalView | LineView:
    """The view that suits the console."""
    return TerminalView(console) if console.is_terminal else LineView(console)

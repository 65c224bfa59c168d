"""Consoles for what the command prints."""

import sys

from rich.console import Console

#: Where nobody sees a terminal's edge, lines are as long as they are.
UNSEEN_COLUMNS = 4096


def output_console() -> Console:
    """Standard output, for tables and records. Nothing in them is markup."""
    width = None if sys.stdout.isatty() else UNSEEN_COLUMNS
    return Console(width=width, highlight=False, markup=False)


def error_console(quiet: bool = False) -> Console:
    """Standard error, for progress and sentences; `quiet` writes nothing."""
    width = None if sys.stderr.isatty() else UNSEEN_COLUMNS
    return Console(stderr=True, width=width, highlight=False, quiet=quiet)

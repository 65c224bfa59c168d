"""What `up` and `demo` share: a cell that runs as long as it is used, every failure told in a sentence."""

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from tandem_cli.cell import ROUTER_DRAIN_S, BadOption, Cell, CellOptions, Unseen, running_cell
from tandem_cli.consoles import error_console
from tandem_cli.exits import Exit, Failure
from tandem_cli.pulling import pull
from tandem_cli.run_folder import run_folder
from tandem_cli.start_view import start_view
from tandem_cli.stop_signals import Interrupted, StopSignals
from tandem_cli.supervisor import CellFailed, Child, Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Teller:
    """Where news go: JSON lines on standard output, or sentences on standard error."""

    console: Console
    as_json: bool

    def event(self, name: str, **details: Any) -> None:
        """One JSON line {"event": name, …}; nothing for people."""
        if self.as_json:
            print(json.dumps({"event": name, **details}), flush=True)

    def say(self, words: str, style: str | None = None) -> None:
        """One sentence for people."""
        if not self.as_json:
            self.console.print(words, style=style, markup=False, soft_wrap=True)


def teller(as_json: bool) -> Teller:
    """A teller for this process."""
    return Teller(error_console(quiet=as_json), as_json)


def with_local_cell(options: CellOptions, tell: Teller, use: Callable[[Cell, Path], T], logs: Path | None = None) -> T | None:
    """Start a cell, return what `use` makes of it and of the folder of its logs, stop it. Nothing is left, whatever happens.

    None when a stop signal came: that is how a cell is meant to end. Raises Failure.
    """
    serving = False
    with run_folder(logs) as folder, StopSignals() as signals:

        def stopping() -> None:
            signals.stopping(kill)
            tell.event("stopping")
            if serving:
                tell.say(f"stopping; what runs has up to {ROUTER_DRAIN_S:.0f} s, Ctrl-C again kills at once")

        def kill() -> None:
            tell.say("killing every process")
            supervisor.kill()

        supervisor = Supervisor(folder.path, folder.lifeline, stopping)
        try:
            pull(options.model, tell.console)
            with ExitStack() as running:
                with nullcontext(Unseen()) if tell.as_json else start_view(tell.console) as view:
                    cell = running.enter_context(running_cell(options, folder.path, view, supervisor))
                serving = True
                return use(cell, folder.path)
        except BadOption as error:
            raise Failure(Exit.BAD_INPUT, str(error)) from None
        except CellFailed as error:
            raise Failure(Exit.FAILED, str(error)) from None
        except Interrupted as signal:
            tell.say(f"stopped by {signal.name}; nothing is left running")
            return None
        finally:
            if supervisor.killed:
                tell.say(f"killed, because they did not end in time: {', '.join(supervisor.killed)}", "red")
            tell.event("stopped", killed=supervisor.killed)


def describe(child: Child) -> dict[str, object]:
    """A ready process for scripts."""
    return {**child.ready, "name": child.name, "pid": child.process.pid, "log": str(child.log)}

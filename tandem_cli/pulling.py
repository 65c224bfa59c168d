"""Fetches a model and shows how far it is."""

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import models
from tandem_cli.exits import Exit, Failure

#: Without a terminal: a line is written that often.
LINE_EVERY_S = 5.0


def pull(name: str, console: Console) -> models.ModelRef:
    """The model, fetched unless it is here. Raises Failure."""
    try:
        return _with_bar(name, console) if console.is_terminal else _with_lines(name, console)
    except models.ModelNotFound as error:
        raise Failure(Exit.NOT_FOUND, str(error)) from None
    except models.UnsupportedModel as error:
        raise Failure(Exit.BAD_INPUT, str(error)) from None
    except models.ModelError as error:
        raise Failure(Exit.FAILED, str(error)) from None


def _with_bar(name: str, console: Console) -> models.ModelRef:
    columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bars:
        task = bars.add_task(f"looking for {name}", total=None)

        def tell(progress: models.PullProgress) -> None:
            bars.update(task, description=f"{name}: {progress.stage}", completed=progress.done_bytes, total=progress.total_bytes)

        return models.pull(name, tell)


def _with_lines(name: str, console: Console) -> models.ModelRef:
    stage, written_at = "", 0.0

    def tell(progress: models.PullProgress) -> None:
        nonlocal stage, written_at
        now = time.monotonic()
        if progress.stage == stage and now - written_at < LINE_EVERY_S:
            return
        stage, written_at = progress.stage, now
        of = f"{progress.done_bytes / 1e6:.0f} of {progress.total_bytes / 1e6:.0f} MB" if progress.total_bytes else ""
        console.print(f"  {name}: {stage} {of}".rstrip(), markup=False)

    return models.pull(name, tell)

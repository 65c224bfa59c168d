"""`python -m tests.soak`: mixed load and faults for a long time, and whether anything grows."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from models import load_tokenizer
from tests.model_files import default_model
from tests.soak.report import faults_of, report, verdict_of
from tests.soak.running import Length, Soak, soak_cell

ROOT = Path(__file__).resolve().parents[2]


def soak(
    minutes: Annotated[float, typer.Option(min=1, max=24 * 60, help="How long waves are begun.")] = 30.0,
    seed: Annotated[str, typer.Option(help="Chooses requests and faults; the same seed plays the same waves.")] = "1",
    requests: Annotated[int, typer.Option(min=2, max=1000, help="Requests of one wave.")] = 16,
    journal: Annotated[str, typer.Option(help="File for every sample, a line of JSON each; unset: none is kept.")] = "",
    logs: Annotated[str, typer.Option(help="Folder for the logs of a soak that was not clean; unset: a new one.")] = "",
) -> None:
    """Exit status 0: clean; 1: something grew, ended wrongly or was left behind."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=False, capture_output=True, text=True, cwd=ROOT)
    print(
        f"Soak of {minutes:g} minutes, seed {seed}, {requests} requests a wave, commit {commit.stdout.strip() or 'none'}.",
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder,
        open(journal or os.devnull, "w") as lines,
        soak_cell(Path(folder)) as cell,
    ):
        running = Soak(cell, load_tokenizer(default_model()), seed, sys.stdout, lines)
        story = asyncio.run(running.run(Length(60.0 * minutes, requests)))
        verdict = verdict_of(story)
        print(f"\n{report(story, verdict)}", flush=True)
        if not faults_of(story, verdict):
            return
        kept = Path(logs or tempfile.mkdtemp(prefix="tandem-soak-failed-"))
        cell.save_logs(kept)
        print(f"\nLogs: {kept}", flush=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(soak)

"""Completion in shells: the printed scripts, run by a shell where it is there, and the answers that they ask the command for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_cli.completion import model_names

COMMAND = Path(sys.executable).parent / "tandem"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def run(argv: list[str], **variables: str) -> str:
    """What it prints. The command is that of this environment, found as `tandem`."""
    path = os.pathsep.join([str(COMMAND.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]), **variables}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    return done.stdout


@pytest.mark.slow
def test_bash_completes_commands_and_options_with_the_printed_script(tmp_path: Path) -> None:
    script = tmp_path / "tandem.bash"
    script.write_text(run([str(COMMAND)], _TANDEM_COMPLETE="source_bash"))
    ask = f"""
        source {script}
        complete -p tandem
        COMP_WORDS=(tandem ge); COMP_CWORD=1; _tandem_completion tandem; echo "${{COMPREPLY[*]}}"
        COMP_WORDS=(tandem generate --max-o); COMP_CWORD=2; _tandem_completion tandem; echo "${{COMPREPLY[*]}}"
        COMP_WORDS=(tandem up --model smol); COMP_CWORD=3; _tandem_completion tandem; echo "${{COMPREPLY[*]}}"
    """
    registered, commands, options, names = run(["bash", "-c", ask]).splitlines()
    assert registered.endswith("-F _tandem_completion tandem")
    assert sorted(commands.split()) == ["generate", "get"]
    assert options == "--max-output-tokens"
    assert "smollm2-135m-instruct" in names.split()


@pytest.mark.slow
def test_zsh_and_fish_get_scripts_and_answers() -> None:
    assert "#compdef tandem" in run([str(COMMAND)], _TANDEM_COMPLETE="source_zsh")
    assert "generate" in run([str(COMMAND)], _TANDEM_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="tandem gen")
    assert "complete --command tandem" in run([str(COMMAND)], _TANDEM_COMPLETE="source_fish")
    asked = {"_TANDEM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert "generate" in run([str(COMMAND)], _TYPER_COMPLETE_ARGS="tandem gen", **asked)


def test_models_are_completed_by_their_beginning() -> None:
    assert "smollm2-135m-instruct" in model_names("smol")
    assert model_names("no such model") == []

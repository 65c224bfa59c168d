"""The folder of one run of a cell: the processes' logs. It goes away with the last process, whatever ends the run."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem_cli.cell_file import FOLDER_PREFIX

#: How long the folder may outlive the last process, in seconds.
REMOVE_S = 5.0
#: Removes the folder $1 once nobody holds the other end of its standard input any more. Signals are for others.
_KEEPER = 'trap "" HUP INT TERM; cat >/dev/null; rm -rf "$1"'


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder, and the descriptor that every process of the run holds open: when all are gone the folder goes."""

    path: Path
    lifeline: int | None


@contextlib.contextmanager
def run_folder(keep: Path | None = None) -> Iterator[RunFolder]:
    """A temporary folder; or `keep`, which is made when it is missing and stays."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield RunFolder(keep, None)
        return
    path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "tandem-keeper", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        yield RunFolder(path, keeper.stdin.fileno())
    finally:
        keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(REMOVE_S)
        shutil.rmtree(path, ignore_errors=True)

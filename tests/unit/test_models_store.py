"""Names, snapshot ids and the hash cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import models
from models import DEFAULT_MODEL, ModelNotFound, UnsupportedModel, list_models, pull, resolve
from models.cache import cache_folder
from models.snapshot import file_sha256, remembered_sha256, snapshot_id
from tests.model_files import default_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (path / name).write_text(name)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_directory(directory: Path, cache: Path) -> None:
    ref = resolve(str(directory), cache=cache)
    assert (ref.name, ref.path, ref.format) == ("my-model", directory, "safetensors")
    assert ref.snapshot == snapshot_id(
        (name, file_sha256(directory / name)) for name in ("config.json", "tokenizer.json", "model.safetensors")
    )
    assert len(ref.snapshot) == 64


def test_a_gguf_file_and_a_directory_with_one(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    ref = resolve(str(file), cache=cache)
    assert (ref.name, ref.path, ref.format) == ("tiny", file, "gguf")
    assert resolve(str(tmp_path), cache=cache) == ref


def test_the_snapshot_follows_the_content_only(directory: Path, cache: Path) -> None:
    first = resolve(str(directory), cache=cache).snapshot
    weights = directory / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    (directory / "README.md").write_text("other words")
    assert resolve(str(directory), cache=cache).snapshot == first
    weights.write_text("other weights")
    assert resolve(str(directory), cache=cache).snapshot != first


def test_moved_bytes_are_another_snapshot() -> None:
    one, two = "1" * 64, "2" * 64
    assert snapshot_id([("a", one), ("b", two)]) == snapshot_id([("b", two), ("a", one)])
    assert snapshot_id([("a", one), ("b", two)]) != snapshot_id([("a", two), ("b", one)])


def test_hashes_are_remembered_by_path_size_and_time(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("one")
    first = remembered_sha256(file, cache)
    (kept,) = (cache / "hashes").iterdir()
    entry = json.loads(kept.read_text())
    kept.write_text(json.dumps({**entry, "sha256": "f" * 64}))
    assert remembered_sha256(file, cache) == "f" * 64  # the note is believed while size and time stay
    os.utime(file, ns=(5, 5))
    assert remembered_sha256(file, cache) == first
    kept.write_text("no JSON")
    assert remembered_sha256(file, cache) == first
    assert [path.name for path in (cache / "hashes").iterdir()] == [kept.name]


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    assert remembered_sha256(blocked, blocked) == file_sha256(blocked)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (DEFAULT_MODEL, f"not on this machine yet. Run: tandem models pull {DEFAULT_MODEL}"),
        ("some-org/some-model", "neither a path.*tandem models pull some-org/some-model"),
        ("nonsense", "no model 'nonsense'.*smollm2-135m-instruct"),
        ("a/b/c", "no model"),
        ("", "no model ''"),
    ],
)
def test_missing_models_say_what_to_do(name: str, message: str, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=message):
        resolve(name, cache=cache)
    assert not cache.exists()


def test_files_that_are_no_model(directory: Path, tmp_path: Path, cache: Path) -> None:
    other = tmp_path / "weights.bin"
    other.write_text("")
    with pytest.raises(UnsupportedModel, match=r"name a \.gguf file"):
        resolve(str(other), cache=cache)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json"):
        resolve(str(directory), cache=cache)


def test_pulling_a_path_is_resolving_it(directory: Path, cache: Path) -> None:
    assert pull(str(directory), cache=cache) == resolve(str(directory), cache=cache)


def test_the_default_model_is_listed() -> None:
    ref = default_model()
    assert ref in list_models()
    assert resolve(DEFAULT_MODEL) == ref
    assert list_models(cache=Path("/nonexistent")) == []


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TANDEM_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "tandem"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"


@pytest.mark.slow
def test_no_torch_is_loaded() -> None:
    probe = "import models, text, sys; print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_exports_exist() -> None:
    assert all(hasattr(models, name) for name in models.__all__)

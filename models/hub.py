"""Models from the Hugging Face hub, for those who can reach it. Files land in the cache folder's own hub cache.

The library is imported where it is used: it takes longer than all else that a short command imports from here.
"""

import os
import re
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.errors import PullFailed
from models.ref import PullProgress, Report

#: The files that make a model: weights, shapes, tokenizer, template.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
#: Other formats of the same weights, in subfolders.
IGNORED = ("*/*",)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_POLL_S = 0.5


def is_hub_id(name: str) -> bool:
    """Whether the name has the form organisation/model."""
    return _HUB_ID.fullmatch(name) is not None


def hub_folder(cache: Path) -> Path:
    """The hub cache inside the cache folder."""
    return cache / "hub"


def local_snapshot(name: str, cache: Path) -> Path | None:
    """The folder of a model that was pulled before; None when it was not. Never asks the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        path = snapshot_download(
            name,
            cache_dir=hub_folder(cache),
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(IGNORED),
            local_files_only=True,
        )
    except (OSError, HFValidationError):  # not there, or half there
        return None
    return Path(path)


def pulled_ids(cache: Path) -> list[str]:
    """The hub ids that have a folder in the cache."""
    folder = hub_folder(cache)
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in names if name.startswith("models--")]


def pull_hub(name: str, cache: Path, report: Report, endpoint: str | None = None) -> Path:
    """Downloads the model's files and returns their folder. Raises PullFailed. Parallel pulls are safe (the library's locks).

    `endpoint` is another hub than the library's own setting (HF_ENDPOINT).
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    report(PullProgress("asking the hub", 0, None))
    disable_progress_bars()
    source = _Source(name, hub_folder(cache), endpoint)
    try:
        return source.download(report)
    except (OSError, HFValidationError) as error:
        raise _failure(name, error) from error


def _failure(name: str, error: Exception) -> PullFailed:
    """What to tell a person. The library wraps the reason when it was asking for sizes only."""
    from huggingface_hub.errors import DryRunError, GatedRepoError, RepositoryNotFoundError

    reason = error.__cause__ if isinstance(error, DryRunError) and error.__cause__ is not None else error
    if isinstance(reason, GatedRepoError):
        return PullFailed(f"{name} asks for consent on its hub page. Give it there, then run hf auth login and pull again.")
    if isinstance(reason, RepositoryNotFoundError):
        return PullFailed(f"The hub has no model {name}, or it is private. Check the name, or run hf auth login.")
    return PullFailed(
        f"The Hugging Face hub could not be asked for {name} ({type(reason).__name__}). Check the network; or copy the "
        "model's directory here and name it by its path."
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """One model on one hub."""

    name: str
    folder: Path
    endpoint: str | None

    def total_bytes(self) -> int:
        """Size of all files that make the model, present or not."""
        from huggingface_hub import snapshot_download

        files = snapshot_download(
            self.name,
            cache_dir=self.folder,
            endpoint=self.endpoint,
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(IGNORED),
            dry_run=True,
        )
        return sum(file.file_size or 0 for file in files)

    def download(self, report: Report) -> Path:
        """Runs the download in a thread (it blocks) and reports how much the model's folder holds."""
        total = self.total_bytes()
        outcome: Future[Path] = Future()
        # A daemon, so that an interrupt ends the process at once; the library resumes half a file later.
        thread = threading.Thread(target=self._fetch, args=(outcome,), name="hub-download", daemon=True)
        thread.start()
        blobs = self.folder / f"models--{self.name.replace('/', '--')}" / "blobs"
        while thread.is_alive():
            report(PullProgress("downloading", min(_bytes_in(blobs), total), total))
            thread.join(_POLL_S)
        if not outcome.done():
            raise PullFailed(f"The download of {self.name} broke off; the reason is printed above. Pull again.")
        report(PullProgress("ready", total, total))
        return outcome.result()

    def _fetch(self, outcome: Future[Path]) -> None:
        from huggingface_hub import snapshot_download

        try:
            path = snapshot_download(
                self.name,
                cache_dir=self.folder,
                endpoint=self.endpoint,
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(IGNORED),
            )
        except (OSError, ValueError, RuntimeError) as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(Path(path))


def _bytes_in(folder: Path) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat().st_size
    return total

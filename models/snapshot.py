"""The snapshot id of a model: the same exactly when its files are. Two members with one id hold the same weights."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from models.cache import write_whole

CHUNK_BYTES = 4 << 20

Counted = Callable[[int], None]


def file_sha256(path: Path, counted: Counted = lambda done_bytes: None) -> str:
    """Hash of a file, 64 hexadecimal digits; `counted` hears the bytes read so far. Raises OSError."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            counted(done)
    return digest.hexdigest()


def remembered_sha256(path: Path, cache: Path) -> str:
    """Like file_sha256, kept in the cache folder for as long as the file's size and modification time stay the same."""
    stat = path.stat()
    known = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    place = cache / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):
        kept = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and isinstance(kept.get("sha256"), str) and {**kept, **known} == kept:
            return str(kept["sha256"])
    sha256 = file_sha256(path)
    with suppress(OSError):  # a cache that cannot be written costs time at the next start, nothing else
        write_whole(place, json.dumps({**known, "sha256": sha256}))
    return sha256


def snapshot_id(files: Iterable[tuple[str, str]]) -> str:
    """Over (name inside the model, sha256 of the file), in order of name: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, sha256 in sorted(files):
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()

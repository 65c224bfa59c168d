"""Values that name a model and tell how far a pull is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model on this machine.

    `path` is a GGUF file or a directory with config.json, tokenizer.json and *.safetensors. `snapshot` is the same exactly
    when the files are: 64 hexadecimal digits over the names and hashes of the files that make the model.
    """

    name: str
    path: Path
    format: Format
    snapshot: str


@dataclass(frozen=True, slots=True)
class PullProgress:
    """`stage` is a short phrase for people; `total_bytes` is None while unknown. `done_bytes` restarts with each stage."""

    stage: str
    done_bytes: int
    total_bytes: int | None


Report = Callable[[PullProgress], None]

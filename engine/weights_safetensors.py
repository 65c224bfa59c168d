"""Weights from safetensors files, one or sharded, memory-mapped."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.weights import WeightsError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
READABLE = frozenset({"F32", "F16", "BF16"})


class SafetensorsSource:
    """Implements engine.weights.WeightSource over a Hugging Face directory. Files stay open (mapped) as long as this lives."""

    def __init__(self, directory: Path, only_file: str | None = None) -> None:
        """only_file: nothing else is read; None: the model's file, or its shards. Raises WeightsError."""
        files = [only_file] if only_file else _files(directory)
        # The library has no types: Any stands for its handles and slices.
        self._files: dict[str, Any] = {file: self._open(directory / file) for file in files}
        self._file_of = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path.name}: {error}; fetch the model again") from error

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._slice(name).get_dtype()
        if stored not in READABLE:
            raise WeightsError(f"tensor {name} is stored as {stored}; {', '.join(sorted(READABLE))} can be read")
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor.to(dtype)

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)


def _files(directory: Path) -> list[str]:
    index = directory / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{INDEX_FILE} has no readable weight_map; fetch the model again") from error

"""An adapter for the model of the soak, made of random numbers."""

from dataclasses import dataclass
from pathlib import Path

import torch

import models
from tests.engine.adapter_files import Tiny, write


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_hidden_layers: int


class _Projections:
    """What the writer of adapters asks of a model: its number of layers, and the shapes of q and v."""

    def __init__(self, config: models.ModelConfig) -> None:
        self.config = _Sizes(config.layers)
        self._outputs = {"q_proj": config.heads * config.head_dim, "v_proj": config.kv_heads * config.head_dim}
        self._inputs = config.hidden

    def get_parameter(self, name: str) -> _Shape:
        return _Shape((self._outputs[name.split(".")[-2]], self._inputs))


def write_adapter(folder: Path, model: models.ModelRef) -> Path:
    """A folder as PEFT saves it."""
    projections: torch.nn.Module = _Projections(models.load_config(model))  # type: ignore[assignment]
    return write(folder, Tiny(7, modules=("q_proj", "v_proj"), size=0.05), projections)

"""LoRA adapters (https://arxiv.org/abs/2106.09685) from folders that the library PEFT writes, in the form the decoder uses.

An adapter adds to a matrix W the product of two thin ones: y = x W^T + scale * (x A^T) B^T. What reads one input is joined, as
the weights themselves are: A of queries, keys and values lie below one another, and their B make blocks of one matrix.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapter_config import MODULES, AdapterConfig, AdapterError, read_config
from engine.backend import Backend
from engine.model_weights import AdapterLayer, LowRank
from engine.weights import WeightsError
from engine.weights_safetensors import SafetensorsSource
from lifecycle.adapters import NAME_CHARACTERS, Adapter
from models.config import ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
#: Adapters of one member.
MAX_ADAPTERS = 64
#: Hex digits of an adapter's identity.
IDENTITY_CHARACTERS = 32
MAX_NAMED_TENSORS = 3
_PREFIX = "base_model.model."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """rank: the greatest, of one matrix. file_bytes: of one adapter's weights, as stored."""

    rank: int = 64
    file_bytes: int = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter by the name that requests ask for. identity: hash of everything in the folder that decides what it computes."""

    name: str
    path: Path
    config: AdapterConfig
    identity: str

    @property
    def adapter(self) -> Adapter:
        """As requests and members name it."""
        return Adapter(self.name, self.identity)


def open_adapters(folders: Mapping[str, Path], limits: AdapterLimits) -> tuple[AdapterFolder, ...]:
    """Look at each folder, reading its weights once for its identity. Raises AdapterError naming the adapter."""
    if len(folders) > MAX_ADAPTERS:
        raise AdapterError(f"adapters has {len(folders)} entries; the limit is {MAX_ADAPTERS}")
    return tuple(_opened(name, folders[name], limits) for name in sorted(folders))


def parse_adapters(entries: Sequence[str]) -> dict[str, Path]:
    """Folders by name, of entries of the form name=folder. Raises AdapterError."""
    folders: dict[str, Path] = {}
    for entry in entries:
        name, equals, folder = entry.partition("=")
        if not equals or not folder or not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS:
            raise AdapterError(
                f"adapters has {entry!r}; an entry is name=folder, the name of up to {NAME_CHARACTERS} letters, digits and ._-"
            )
        if name in folders:
            raise AdapterError(f"adapters has {name!r} twice; names differ")
        folders[name] = Path(folder)
    return folders


def load_adapters(
    adapters: Sequence[AdapterFolder], config: ModelConfig, backend: Backend, device: torch.device
) -> dict[str, tuple[AdapterLayer, ...]]:
    """By name, a value for each layer of the model. Raises AdapterError naming the adapter, and the tensor or field."""
    if adapters and config.latent is not None:
        raise AdapterError(
            f"adapter {adapters[0].name!r}: {config.architecture} has attention over latent vectors, which no adapter can change"
        )
    loaded = {}
    for each in adapters:
        try:
            loaded[each.name] = _Loader(each, config, backend, device).load()
        except (AdapterError, WeightsError) as error:
            raise AdapterError(f"adapter {each.name!r}: {error}") from error
    return loaded


def _opened(name: str, path: Path, limits: AdapterLimits) -> AdapterFolder:
    try:
        config = read_config(path, limits.rank)
        return AdapterFolder(name, path, config, _identity(path / WEIGHTS_FILE, config, limits))
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r} in {path}: {error}") from error
    except OSError as error:
        raise AdapterError(f"adapter {name!r} in {path}: cannot read {WEIGHTS_FILE}: {error.strerror}") from error


def _identity(weights: Path, config: AdapterConfig, limits: AdapterLimits) -> str:
    size = weights.stat().st_size
    if size > limits.file_bytes:
        raise AdapterError(f"{WEIGHTS_FILE} has {size} bytes; the limit is {limits.file_bytes} (setting adapter_max_bytes)")
    canonical = config.canonical.encode()
    digest = hashlib.sha256(len(canonical).to_bytes(8, "little") + canonical)
    with weights.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()[:IDENTITY_CHARACTERS]


class _Loader:
    """One adapter's tensors into the packing of one backend, each shape checked."""

    def __init__(self, adapter: AdapterFolder, config: ModelConfig, backend: Backend, device: torch.device) -> None:
        self._adapter = adapter.config
        self._layers = config.layers
        self._backend = backend
        self._device = device
        self._source = SafetensorsSource(adapter.path, WEIGHTS_FILE)
        self._names = self._source.names()
        self._read: set[str] = set()
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        #: Inputs and outputs of each module.
        self._sizes = {
            "q_proj": (config.hidden, queries),
            "k_proj": (config.hidden, keys),
            "v_proj": (config.hidden, keys),
            "o_proj": (queries, config.hidden),
            "gate_proj": (config.hidden, config.intermediate),
            "up_proj": (config.hidden, config.intermediate),
            "down_proj": (config.intermediate, config.hidden),
        }

    def load(self) -> tuple[AdapterLayer, ...]:
        beyond = [layer for layer in self._adapter.layers or () if layer >= self._layers]
        if beyond:
            raise AdapterError(f"layers_to_transform has {beyond[0]}; the model has layers 0 to {self._layers - 1}")
        layers = tuple(self._layer(layer) if self._adapter.has(layer) else AdapterLayer() for layer in range(self._layers))
        unused = sorted(self._names - self._read)
        if unused:
            shown = ", ".join(unused[:MAX_NAMED_TENSORS])
            raise AdapterError(f"{WEIGHTS_FILE} has {len(unused)} tensors that are no updates of target_modules: {shown}")
        return layers

    def _layer(self, layer: int) -> AdapterLayer:
        gate_up = self._joined(layer, ("gate_proj", "up_proj"))
        return AdapterLayer(
            qkv=self._update(layer, ("q_proj", "k_proj", "v_proj")),
            output=self._update(layer, ("o_proj",)),
            gate_up=None if gate_up is None else self._backend.pack_gate_up_update(*gate_up),
            down=self._update(layer, ("down_proj",)),
        )

    def _update(self, layer: int, modules: tuple[str, ...]) -> LowRank | None:
        joined = self._joined(layer, modules)
        return None if joined is None else self._backend.pack_update(*joined)

    def _joined(self, layer: int, modules: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """float32 [ranks, in] and [out, ranks] of modules with one input; zeros where a module has no part. None: no module has
        an update."""
        downs: list[torch.Tensor] = []
        blocks: list[tuple[int, torch.Tensor]] = []
        outputs = 0
        for module in modules:
            if module in self._adapter.modules:
                down, up = self._pair(layer, module)
                downs.append(down)
                blocks.append((outputs, up))
            outputs += self._sizes[module][1]
        if not downs:
            return None
        up = torch.zeros((outputs, sum(down.shape[0] for down in downs)), dtype=torch.float32, device=self._device)
        rank = 0
        for first, block in blocks:
            up[first : first + block.shape[0], rank : rank + block.shape[1]] = block
            rank += block.shape[1]
        return torch.cat(downs), up

    def _pair(self, layer: int, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A, and B times the scale."""
        name = f"model.layers.{layer}.{MODULES[module]}.{module}"
        rank = self._adapter.rank_of(name)
        inputs, outputs = self._sizes[module]
        down = self._tensor(f"{_PREFIX}{name}.lora_A.weight", (rank, inputs))
        up = self._tensor(f"{_PREFIX}{name}.lora_B.weight", (outputs, rank))
        return down, up * self._adapter.scale_of(name)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise AdapterError(f"{WEIGHTS_FILE} has no tensor {name}, which target_modules asks for")
        if self._source.shape(name) != shape:
            raise AdapterError(f"tensor {name} has shape {list(self._source.shape(name))}; rank and model say {list(shape)}")
        self._read.add(name)
        tensor = self._source.read(name, torch.float32).to(self._device)
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"tensor {name} has values that are no numbers")
        return tensor

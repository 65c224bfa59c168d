"""adapter_config.json of a LoRA adapter, as the library PEFT writes it: which matrices have an update, of which rank and scale.

Fields: https://huggingface.co/docs/peft/package_reference/lora (LoraConfig). A field that would change what the model says and
that the decoder does not have is refused by its name; fields that only mattered for training are not read.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES = 1024 * 1024
#: The matrices of a layer that can have an update, and where they stand in it.
MODULES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
ALL_LINEAR = "all-linear"
#: Fields that must have one of these values, where they are there at all.
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    **dict.fromkeys(
        (
            *("modules_to_save", "layer_replication", "exclude_modules", "target_parameters"),
            *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "megatron_config", "layers_pattern"),
        ),
        (None, [], {}, ""),
    ),
}
#: Ways to begin that leave the base model as it is; the others train against a base of their own.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_PATTERN = re.compile(r"\^?[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


class AdapterError(ValueError):
    """A folder does not hold an adapter that this model can run with. The message names the file, the field and the limit."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank_pattern, alpha_pattern: ends of modules' full names, for which rank and alpha are others. layers: those that have
    updates; None: all."""

    modules: tuple[str, ...]
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    by_root_of_rank: bool
    layers: tuple[int, ...] | None

    def rank_of(self, module: str) -> int:
        """module: its full name, such as model.layers.3.mlp.up_proj."""
        return next((rank for ending, rank in self.rank_pattern.items() if _ends(module, ending)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the update is multiplied with: alpha / rank, or alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732)."""
        alpha = next((alpha for ending, alpha in self.alpha_pattern.items() if _ends(module, ending)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root_of_rank else rank)

    def has(self, layer: int) -> bool:
        """Whether a layer has updates."""
        return self.layers is None or layer in self.layers

    @property
    def canonical(self) -> str:
        """Two adapters whose files differ only in what is not read here have the same."""
        layers = None if self.layers is None else sorted(self.layers)
        ranks, alphas = sorted(self.rank_pattern.items()), sorted(self.alpha_pattern.items())
        return json.dumps([sorted(self.modules), self.rank, self.alpha, ranks, alphas, self.by_root_of_rank, layers])


def read_config(folder: Path, most_rank: int) -> AdapterConfig:
    """Raises AdapterError for a file that cannot be read, a field that is not supported, and a rank above `most_rank`."""
    fields = _fields(folder)
    for name, allowed in _ONLY.items():
        if name in fields and not any(fields[name] is one or fields[name] == one for one in allowed):
            raise AdapterError(f"{CONFIG_FILE}: {name} is {fields[name]!r}; only {allowed[0]!r} is supported")
    if "peft_type" not in fields:
        raise AdapterError(f"{CONFIG_FILE}: peft_type is missing; only 'LORA' is supported")
    begun = fields.get("init_lora_weights", True)
    if begun not in _BEGINNINGS:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {begun!r}, which changes the base model; convert the adapter to a plain one"
        )
    return AdapterConfig(
        modules=_modules(fields.get("target_modules")),
        rank=_rank("r", fields.get("r"), most_rank),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        rank_pattern={ending: _rank(name, rank, most_rank) for name, ending, rank in _entries(fields, "rank_pattern")},
        alpha_pattern={ending: _alpha(name, alpha) for name, ending, alpha in _entries(fields, "alpha_pattern")},
        by_root_of_rank=_yes_or_no(fields, "use_rslora"),
        layers=_layers(fields.get("layers_to_transform")),
    )


def _fields(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        size = path.stat().st_size
        if size > CONFIG_BYTES:
            raise AdapterError(f"{CONFIG_FILE} has {size} bytes; the limit is {CONFIG_BYTES}")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterError(f"cannot read {CONFIG_FILE}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{CONFIG_FILE} is no JSON object")
    return fields


def _modules(names: object) -> tuple[str, ...]:
    if names == ALL_LINEAR:
        return tuple(MODULES)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise AdapterError(f"{CONFIG_FILE}: target_modules is {names!r}; it must be a list of modules, or {ALL_LINEAR!r}")
    unknown = sorted(set(names) - MODULES.keys())
    if unknown:
        raise AdapterError(f"{CONFIG_FILE}: target_modules has {', '.join(unknown)}; there are {', '.join(MODULES)}")
    return tuple(name for name in MODULES if name in names)


def _rank(name: str, rank: object, most: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise AdapterError(f"{CONFIG_FILE}: {name} is {rank!r}; it must be 1 to {most} (setting adapter_max_rank)")
    return rank


def _alpha(name: str, alpha: object) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{CONFIG_FILE}: {name} is {alpha!r}; it must be a number")
    return float(alpha)


def _entries(fields: dict[str, Any], field: str) -> list[tuple[str, str, object]]:
    """The field's entries: how to name one, the ending of modules that it is for, and its value."""
    found = fields.get(field) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{CONFIG_FILE}: {field} is {found!r}; it must be an object")
    for key in found:
        if not _PATTERN.fullmatch(key):
            raise AdapterError(f"{CONFIG_FILE}: {field} has {key!r}; only names of modules, or ends of them, are supported")
    return [(f"{field}[{key!r}]", key, value) for key, value in found.items()]


def _yes_or_no(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name) or False
    if value is not True and value is not False:
        raise AdapterError(f"{CONFIG_FILE}: {name} is {value!r}; it must be true or false")
    return bool(value)


def _layers(layers: object) -> tuple[int, ...] | None:
    if layers is None:
        return None
    found = layers if isinstance(layers, list) else [layers]
    if not found or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
        raise AdapterError(f"{CONFIG_FILE}: layers_to_transform is {layers!r}; it must be a layer's number, or a list of them")
    return tuple(found)


def _ends(module: str, ending: str) -> bool:
    """Whether a name ends in whole parts with `ending`; one that begins with ^ is the whole name."""
    if ending.startswith("^"):
        return module == ending[1:]
    return module == ending or module.endswith("." + ending)

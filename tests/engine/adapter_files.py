"""Folders of LoRA adapters as PEFT writes them, with random content, and the same merged into a model by hand."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapters import AdapterFolder, AdapterLimits, open_adapters

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLACES = {**dict.fromkeys(ALL[:4], "self_attn"), **dict.fromkeys(ALL[4:], "mlp")}


@dataclass(frozen=True)
class Tiny:
    """What an adapter of the tests is made of. ranks, alphas: by module, where they differ."""

    seed: int
    modules: Sequence[str] = ALL
    rank: int = 4
    alpha: float = 8.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = False
    layers: Sequence[int] | None = None
    size: float = 0.5

    def config(self) -> dict[str, object]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.modules),
            "bias": "none",
            "use_rslora": self.by_root,
            "use_dora": False,
            "fan_in_fan_out": False,
            "modules_to_save": None,
            "lora_dropout": 0.1,
            "inference_mode": True,
            "rank_pattern": dict(self.ranks),
            "alpha_pattern": dict(self.alphas),
            "layers_to_transform": None if self.layers is None else list(self.layers),
        }

    def scale(self, module: str) -> float:
        alpha, rank = self.alphas.get(module, self.alpha), self.ranks.get(module, self.rank)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """A and B of every module of the layers, by PEFT's names."""
        generator = torch.Generator().manual_seed(self.seed)
        found = {}
        for layer in range(model.config.num_hidden_layers):
            if self.layers is not None and layer not in self.layers:
                continue
            for module in self.modules:
                name = f"model.layers.{layer}.{PLACES[module]}.{module}"
                outputs, inputs = model.get_parameter(f"{name}.weight").shape
                rank = self.ranks.get(module, self.rank)
                down = torch.randn((rank, inputs), generator=generator) * inputs**-0.5
                up = torch.randn((outputs, rank), generator=generator) * self.size / self.scale(module)
                found[f"base_model.model.{name}.lora_A.weight"] = down
                found[f"base_model.model.{name}.lora_B.weight"] = up
        return found


def write(folder: Path, tiny: Tiny, model: torch.nn.Module, **changes: object) -> Path:
    """A folder as PEFT saves it. changes: of fields of the configuration."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**tiny.config(), **changes}))
    save_file(tiny.tensors(model), folder / "adapter_model.safetensors")
    return folder


def merged(model: torch.nn.Module, tiny: Tiny) -> torch.nn.Module:
    """A copy of the float32 model with scale * B A added to its matrices."""
    whole = copy.deepcopy(model)
    tensors = tiny.tensors(model)
    with torch.no_grad():
        for name in [name for name in tensors if "lora_A" in name]:
            plain = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            whole.get_parameter(f"{plain}.weight").add_(added * tiny.scale(plain.rpartition(".")[2]))
    return whole


def opened(folders: Mapping[str, Path], limits: AdapterLimits | None = None) -> tuple[AdapterFolder, ...]:
    return open_adapters(folders, limits or AdapterLimits())

"""Which layers of a model share a KV group, and what a backend of each group is built for."""

from dataclasses import dataclass

import torch

from engine.backend import Setup
from engine.layout import GroupKind, GroupLayout
from engine.llama import LayerPlace
from engine.rope import rope_table
from engine.slab import Slab
from models.config import ModelConfig
from models.module_config import ModuleConfig
from models.rope import RopeConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers (numbers, ascending) whose pages live and die together, and how they turn positions; None where modules of
    transformers do that."""

    layout: GroupLayout
    layers: tuple[int, ...]
    rope: RopeConfig | None


def kv_groups(config: ModelConfig | ModuleConfig, page_tokens: int, dtype: str) -> tuple[KvGroup, ...]:
    """The groups of a model: layers that see everything, then layers behind a window. Raises ValueError for wrong sizes.

    Layers of transformers' modules are one group, which keeps everything: how far back they look is found when they are loaded.
    """
    if isinstance(config, ModuleConfig):
        layout = GroupLayout(GroupKind.FULL, config.layers, config.kv_heads, config.head_dim, page_tokens, dtype)
        return (KvGroup(layout, tuple(range(config.layers)), None),)
    groups = []
    for window in sorted(
        {config.window(layer) for layer in range(config.layers)}, key=lambda window: (window is not None, window)
    ):
        layers = tuple(layer for layer in range(config.layers) if config.window(layer) == window)
        kind = GroupKind.FULL if window is None else GroupKind.SLIDING
        if config.latent is not None:
            kind = GroupKind.LATENT
        layout = GroupLayout(kind, len(layers), config.kv_heads, config.head_dim, page_tokens, dtype, window)
        rope = config.window_rope if window is not None and config.window_rope is not None else config.rope
        groups.append(KvGroup(layout, layers, rope))
    return tuple(groups)


def positions_text(config: ModelConfig | ModuleConfig, groups: tuple[KvGroup, ...]) -> str:
    """How positions enter the KV, for engine.layout.Layout."""
    if isinstance(config, ModuleConfig):
        return f"modules of {config.architecture}"
    return repr(tuple(group.rope for group in groups))


def layer_places(groups: tuple[KvGroup, ...]) -> tuple[LayerPlace, ...]:
    """Where the KV of each layer of the model is."""
    places = {layer: LayerPlace(number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)}
    return tuple(places[layer] for layer in sorted(places))


def group_setup(config: ModelConfig, group: KvGroup, slab: Slab, positions: int, device: torch.device) -> Setup:
    """What the backend of a group is built for. `positions`: those that a sequence can reach."""
    assert group.rope is not None, "only modules have groups without rotary positions of ours"
    layout = group.layout
    dtype = DTYPES[layout.dtype]
    latent = config.latent
    vectors = layout.row_elements // (layout.kv_heads * layout.head_dim)
    shape = (slab.memory.units, layout.layers, layout.page_tokens, vectors, layout.kv_heads, layout.head_dim)
    return Setup(
        device=device,
        dtype=dtype,
        heads=config.heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        rms_eps=config.rms_eps,
        pool=slab.data.view(dtype).view(shape),
        rope=rope_table(group.rope, layout.head_dim if latent is None else latent.rope_dim, positions).to(device),
        window=layout.window,
        score_scale=config.query_scale,
        activation=config.activation,
        latent_rank=None if latent is None else latent.rank,
    )

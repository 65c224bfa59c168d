"""Where transformers' modules meet our pages: an attention function and a mask function for its registries.

Each layer of a model calls the attention function with its queries, keys and values of all packed rows, as a batch of one. A mask
is not made: which rows see which is in the step, and the mask function only says how far back a layer looks.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Each model has an attention function of its own in transformers' registry, under a name with a number.
_NUMBERS = itertools.count()
# Arguments of an attention call that change nothing here: positions are in the queries and keys already, and packing in the step.
_WITHOUT_EFFECT = frozenset(
    {"sliding_window", "position_ids", "cache_position", "position_embeddings", "use_cache", "return_dict", "logits_to_keep"}
)


class ModuleUnfit(RuntimeError):
    """The modules of a model do something that attention over pages would not do as they mean it."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """How a layer weighs what it sees. window: tokens that a query sees, itself included; None when it sees all. scale: what
    scores are multiplied with. cap: scores s become cap * tanh(s / cap); None where they stay."""

    window: int | None
    scale: float
    cap: float | None


class Keeper(Protocol):
    """Keeps the KV of one step's rows and attends over it. T is the number of packed rows."""

    def attend(
        self,
        layer: int,
        view: LayerView,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key [T, kv_heads, head_dim], value [T, kv_heads, value_dim] to [T, heads, value_dim].

        sinks: [heads], one more score for each head that takes its share of the weights and has no value.
        Layers come in ascending order. Raises ModuleUnfit for one that the pages are not made for.
        """
        ...


class ModuleAttention:
    """transformers' attention interface for one model. keeper: whom the layers' rows go to; who runs the model puts it there."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, T, head_dim], key and value [1, kv_heads, T, …] to [1, T, heads, …].

        Raises ModuleUnfit for whatever would be left out.
        """
        given = {name for name, value in others.items() if value is not None and value is not False}
        unknown = sorted(given - _WITHOUT_EFFECT)
        if unknown:
            raise ModuleUnfit(f"its attention has {unknown[0]}, which attention over pages does not know")
        if is_causal is False or dropout:
            raise ModuleUnfit("its attention is not causal" if is_causal is False else "its attention drops weights")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ModuleUnfit("its attention does not say which layer it is of")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        view = LayerView(_window(attention_mask), scale, softcap)
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        return self.keeper.attend(layer, view, queries, keys, values, s_aux)[None], None


def register(library: Any, attention: ModuleAttention) -> str:
    """Make `attention` known to transformers, and return its name there. The library keeps the name, but not `attention`."""
    name, held = f"tandem_{next(_NUMBERS)}", weakref.ref(attention)

    def attend(*given: Any, **named: Any) -> tuple[torch.Tensor, None]:
        called = held()
        assert called is not None, "a model lives no longer than its attention"
        return called(*given, **named)

    library.AttentionInterface.register(name, attend)
    library.AttentionMaskInterface.register(name, mask)
    return name


def mask(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> torch.Tensor:
    """transformers' mask interface: an int64 [1, 1, 1, 1] with the window in tokens, 0 for none, instead of a mask.

    Raises ModuleUnfit when mask_function(batch, head, query, key) is neither causal nor a causal window of local_size tokens.
    """
    if use_vmap or not _looks_back(mask_function, local_size):
        raise ModuleUnfit("its attention mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64)


def _window(mark: torch.Tensor | None) -> int | None:
    """Out of what `mask` has made."""
    if mark is None or mark.dtype != torch.int64 or mark.shape != (1, 1, 1, 1):
        raise ModuleUnfit("it makes attention masks of its own")
    return int(mark) or None


def _looks_back(mask_function: Callable[..., torch.Tensor], window: int | None) -> bool:
    """Tried at the borders of what a few queries see."""
    none = torch.tensor(0)
    for query in (0, 1, 3) if window is None else (0, window - 1, window, window + window // 2):
        border = 0 if window is None else query - window
        keys = torch.tensor(sorted({max(0, key) for key in (0, border - 1, border, border + 1, query - 1, query, query + 1)}))
        expected = keys <= query
        if window is not None:
            expected &= keys > border
        try:
            seen = mask_function(none, none, torch.tensor(query), keys)
        except IndexError:
            # It looks something up for each token of this step.
            return False
        if not torch.equal(seen, expected):
            return False
    return True

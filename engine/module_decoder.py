"""A decoder made of transformers' modules, with the KV of its layers in our pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.backend import Backend
from engine.batch import LayerMarks
from engine.core_share import NO_LOAN, Loan
from engine.module_attention import LayerView, ModuleAttention, ModuleUnfit
from engine.scored_attention import ScoredAttention
from engine.step import Ints, Step

# A transformers model: tensors by name, an output with `logits`. The library has no types: Any stands for what it returns.
Forward = Callable[..., Any]
#: What a backend is built for: window and scale of scores.
Reach = tuple[int | None, float]


@dataclass(frozen=True, slots=True)
class KeptShape:
    """What all layers store: layers, key heads, elements of a head, and the type of pages."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def check(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ModuleUnfit when a layer's heads (see engine.module_attention.Keeper) are others."""
        found, kept = (query.shape[1], *key.shape[1:]), (self.heads, self.kv_heads, self.head_dim)
        if found != kept or value.shape[1] != self.kv_heads or value.shape[2] > self.head_dim:
            raise ModuleUnfit(
                f"layer {layer} has {found[0]} query heads, {found[1]} key heads of {found[2]} elements and {value.shape[1]} "
                f"value heads of {value.shape[2]}; its config.json says {kept[0]}, {kept[1]} and {kept[2]} for all layers, and a "
                "value may be no longer than a key"
            )


class PackedRows(Protocol):
    """Tokens of one forward, int64 [T] each, and the rows whose logits are wanted, int64 [R]. A Step is one."""

    @property
    def token_ids(self) -> Ints: ...

    @property
    def positions(self) -> Ints: ...

    @property
    def logit_rows(self) -> Ints: ...


class PagedKeeper:
    """Implements engine.module_attention.Keeper over the pages of one KV group, for one step after the other.

    backends: by what they are built for, over one pool; a layer uses the one that looks back as it does. Nothing is rotated in
    them: modules hand over keys with their positions in them.
    """

    def __init__(self, shape: KeptShape, backends: Mapping[Reach, Backend], scored: ScoredAttention) -> None:
        self._shape = shape
        self._backends = dict(backends)
        self._scored = scored
        self._step: Step | None = None
        self._marks: LayerMarks | None = None
        self._written = 0

    def begin(self, step: Step, marks: LayerMarks | None) -> None:
        """Take in a step and clear the pages that it begins."""
        self._step, self._marks, self._written = step, marks, 0
        for backend in self._backends.values():
            backend.begin(step)

    def end(self) -> None:
        """Raises ModuleUnfit when not every layer has come."""
        if self._written != self._shape.layers:
            raise ModuleUnfit(f"{self._written} of its {self._shape.layers} layers have attention that can be reached")

    def attend(
        self,
        layer: int,
        view: LayerView,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Keeper. Tells the marks once the layer's KV is in the pages."""
        assert self._step is not None, "begin() comes before the layers"
        backend = self._backends.get((view.window, view.scale))
        if layer != self._written or backend is None:
            raise ModuleUnfit(f"layer {layer} of its attention came after {self._written} others, or looks back in another way")
        self._shape.check(layer, query, key, value)
        head_dim, value_dim = self._shape.head_dim, value.shape[2]
        wide = torch.nn.functional.pad(value, (0, head_dim - value_dim))
        rows = torch.cat([part.flatten(1).to(self._shape.dtype) for part in (query, key, wide)], dim=1)
        rows = backend.rotate_and_store(rows, layer, None)
        self._written += 1
        if self._marks is not None and self._written in self._marks.layers:
            self._marks.told(self._written)
        if view.cap is not None or sinks is not None:
            out = self._scored.attend(self._step, layer, view, query, sinks)
        else:
            out = backend.attend(rows, layer).view(-1, self._shape.heads, head_dim)
        return out[..., :value_dim].to(query.dtype)


def run_modules(forward: Forward, rows: PackedRows, device: torch.device) -> torch.Tensor:
    """float32 logits [R, vocabulary] of the wanted rows; all rows are a batch of one."""
    out = forward(
        input_ids=torch.from_numpy(rows.token_ids)[None].to(device),
        # Given, so that a model neither looks for several sequences in the positions nor pads.
        attention_mask=torch.ones((1, rows.token_ids.size), dtype=torch.int64, device=device),
        position_ids=torch.from_numpy(rows.positions)[None].to(device),
        use_cache=False,
        logits_to_keep=torch.from_numpy(rows.logit_rows).to(device),
    )
    logits: torch.Tensor = out.logits[0]
    return logits.float()


class ModuleDecoder:
    """Computes steps with a transformers model; see engine.runner.StepDecoder."""

    #: The products of modules are torch's, which may sum the rows of a chunk in another order than a single one.
    chunks_read_as_rows = False

    def __init__(self, forward: Forward, attention: ModuleAttention, keeper: PagedKeeper, device: torch.device) -> None:
        """attention: of this model; from now on its rows go to `keeper`."""
        self._forward = forward
        self._attention = attention
        attention.keeper = keeper
        self._keeper = keeper
        self._device = device

    @property
    def uses_loans(self) -> bool:
        """Its modules compute with their own."""
        return False

    def forward(self, steps: Sequence[Step], marks: LayerMarks | None = None, loan: Loan = NO_LOAN) -> torch.Tensor:
        """Write the KV of all T rows and return float32 logits [R, vocabulary] of step.logit_rows. steps: of the one KV group.

        Only the wanted rows reach the head. The loan is not used.
        """
        (step,) = steps
        self._keeper.begin(step, marks)
        logits = run_modules(self._forward, step, self._device)
        self._keeper.end()
        return logits

    def part_seconds(self) -> Mapping[str, float]:
        """Nothing is counted."""
        return {}

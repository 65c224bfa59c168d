"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ only in what their weights contain and in
what their layers see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.backend import Backend, RowsUpdate
from engine.batch import LayerMarks
from engine.core_share import NO_LOAN, Loan
from engine.model_weights import AdapterLayer, LayerWeights, LowRank, ModelWeights, PackedLinear
from engine.step import AdapterRows, Step


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the KV of a layer is: which KV group, and which layer of that."""

    group: int
    layer: int


class Decoder:
    """Pre-norm blocks of grouped-query attention and a gated MLP over backends that own the KV pools.

    backends: one for each KV group, of one kind; the first one computes what has nothing to do with KV. places: one for each
    layer; by default all are layers of one group.
    """

    def __init__(self, weights: ModelWeights, backends: Sequence[Backend], places: Sequence[LayerPlace] = ()) -> None:
        self.weights = weights
        self._backends = tuple(backends)
        self._places = tuple(places) or tuple(LayerPlace(0, layer) for layer in range(len(weights.layers)))
        self._whole_step = backends[0].whole_step(weights) if len(backends) == 1 else None

    def forward(self, steps: Sequence[Step], marks: LayerMarks | None = None, loan: Loan = NO_LOAN) -> torch.Tensor:
        """Write the KV of all T rows and return float32 logits [R, vocabulary] of step.logit_rows. steps: one for each KV group.
        loan: what a whole step may use beside the backend's own threads.

        Past the last layer's KV only the wanted rows are computed: nothing reads the others.
        """
        if self._whole_step is not None:
            return self._whole_step(steps[0], marks, loan)
        return self.compose(steps, marks)

    @property
    def chunks_read_as_rows(self) -> bool:
        """See Backend."""
        return self._backends[0].chunks_read_as_rows

    @property
    def uses_loans(self) -> bool:
        """Whole steps do; what is composed of operations computes with the backend's own threads."""
        return self._whole_step is not None

    def part_seconds(self) -> Mapping[str, float]:
        """Where the time of whole steps went, by part; empty for a backend that does not count it."""
        return self._whole_step.part_seconds() if self._whole_step is not None else {}

    def compose(self, steps: Sequence[Step], marks: LayerMarks | None = None) -> torch.Tensor:
        """`forward` out of single operations."""
        weights, backend, step = self.weights, self._backends[0], steps[0]
        device = weights.embedding.device
        for each, own in zip(self._backends, steps, strict=True):
            each.begin(own)
        wanted = torch.from_numpy(step.logit_rows).to(device)
        residual = weights.embedding.index_select(0, torch.from_numpy(step.token_ids).to(device))
        if weights.embedding_scale != 1.0:
            residual.mul_(torch.tensor(weights.embedding_scale, dtype=residual.dtype, device=device))
        last = len(weights.layers) - 1
        for index, (layer, place) in enumerate(zip(weights.layers, self._places, strict=True)):
            keeper = self._backends[place.group]
            changes = self._changes(step.adapted, index)
            qkv = self._qkv(backend.norm(residual, layer.attention_norm), layer, changes)
            qkv = keeper.rotate_and_store(qkv, place.layer, layer.head_norms)
            if marks is not None and index + 1 in marks.layers:
                marks.told(index + 1)
            if index == last and wanted.shape[0] == 0:
                break
            attended = keeper.attend(qkv, place.layer)
            if index == last:
                attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
                changes = self._changes(step.adapted_logits, index)
            residual = self._behind(attended, layer, residual, changes)
        if wanted.shape[0] == 0:
            return torch.empty((0, weights.embedding.shape[0]), dtype=torch.float32, device=device)
        return backend.logits(backend.norm(residual, weights.final_norm), weights.head)

    def _changes(self, adapted: Sequence[AdapterRows], layer: int) -> "_Changes":
        return _Changes(tuple((each, self.weights.adapters[each.adapter][layer]) for each in adapted))

    def _qkv(self, x: torch.Tensor, layer: LayerWeights, changes: "_Changes") -> torch.Tensor:
        backend, query = self._backends[0], layer.query
        qkv = backend.linear(x, layer.qkv, changes.of(lambda adapter: adapter.qkv))
        if query is None:
            return qkv
        queries = backend.linear(backend.norm(backend.linear(x, query.down), query.norm), query.up)
        return torch.cat([queries, qkv], dim=1)

    def _behind(
        self, attended: torch.Tensor, layer: LayerWeights, own_residual: torch.Tensor, changes: "_Changes"
    ) -> torch.Tensor:
        """What follows attention in a layer."""
        backend = self._backends[0]
        changed = changes.of(lambda adapter: adapter.output)
        residual = self._added(attended, layer.output, layer.attention_post_norm, own_residual, changed)
        changed = changes.of(lambda adapter: adapter.gate_up)
        hidden = backend.gated(backend.norm(residual, layer.mlp_norm), layer.gate_up, changed)
        return self._added(hidden, layer.down, layer.mlp_post_norm, residual, changes.of(lambda adapter: adapter.down))

    def _added(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        post_norm: torch.Tensor | None,
        own_residual: torch.Tensor,
        updates: Sequence[RowsUpdate],
    ) -> torch.Tensor:
        backend = self._backends[0]
        if post_norm is None:
            return backend.linear_add(x, packed, own_residual, updates)
        return own_residual.add_(backend.norm(backend.linear(x, packed, updates), post_norm))


@dataclass(frozen=True, slots=True)
class _Changes:
    """What adapters change in one layer, for the rows that have them."""

    adapters: tuple[tuple[AdapterRows, AdapterLayer], ...]

    def of(self, which: Callable[[AdapterLayer], LowRank | None]) -> tuple[RowsUpdate, ...]:
        """The updates of one product."""
        found = ((each.rows, which(layer)) for each, layer in self.adapters)
        return tuple(RowsUpdate(rows, update) for rows, update in found if update is not None)

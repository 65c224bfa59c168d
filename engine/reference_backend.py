"""The slow, plain backend that others are compared with: everything in float32, one sequence at a time, no clever step."""

import math
from collections.abc import Sequence

import torch

from engine.backend import Registration, RowsUpdate, Setup, WholeStep
from engine.model_weights import LowRank, ModelWeights, PackedLinear
from engine.quantisation import WeightQuantisation, quantise
from engine.step import Step
from models.config import Activation

NAME = "reference"


class ReferenceBackend:
    """Implements engine.backend.Backend by the formulas, without packing, masks of a whole batch, or padded tables."""

    name = NAME
    chunks_read_as_rows = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._step: Step | None = None

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        outputs, inputs = weight.shape
        if self._setup.quantisation is WeightQuantisation.OFF:
            return PackedLinear(weight, bias, inputs, outputs)
        small = quantise(weight)
        return PackedLinear(small.values, bias, inputs, outputs, small.scales)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self.pack(weight, bias)

    def pack_head(self, weight: torch.Tensor) -> PackedLinear:
        return self.pack(weight, None)

    def pack_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return LowRank(*(PackedLinear(each, None, each.shape[1], each.shape[0]) for each in (down, up)))

    def pack_gate_up_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return self.pack_update(down, up)

    def begin(self, step: Step) -> None:
        self._step = step
        for page in step.fresh_pages.tolist():
            self._setup.pool[page] = 0

    def linear(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        return self._updated(x, packed, updates).to(x.dtype)

    def linear_add(
        self, x: torch.Tensor, packed: PackedLinear, own_residual: torch.Tensor, updates: Sequence[RowsUpdate] = ()
    ) -> torch.Tensor:
        return (self._updated(x, packed, updates) + own_residual.float()).to(x.dtype)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._unit(x.float()).mul(weight.float()).to(x.dtype)

    def gated(self, x: torch.Tensor, gate_up: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        gate, up = self._updated(x, gate_up, updates).chunk(2, dim=-1)
        if self._setup.activation is Activation.SILU:
            return (gate * torch.sigmoid(gate) * up).to(x.dtype)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(x.dtype)

    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        step = self._current()
        if self._setup.latent_rank is not None:
            return self._rotate_latent(own_qkv, layer, head_norms, self._setup.latent_rank)
        query, key, value = self._split(own_qkv.float())
        if head_norms is not None:
            query = self._unit(query) * head_norms[: self._setup.heads]
            key = self._unit(key) * head_norms[self._setup.heads :]
        positions = torch.from_numpy(step.positions).to(own_qkv.device)
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        for row, (page, offset) in enumerate(zip(step.write_pages.tolist(), step.write_offsets.tolist(), strict=True)):
            self._setup.pool[page, layer, offset, 0] = key[row].to(own_qkv.dtype)
            self._setup.pool[page, layer, offset, 1] = value[row].to(own_qkv.dtype)
        return torch.cat([part.flatten(1) for part in (query, key, value)], dim=1).to(own_qkv.dtype)

    def _rotate_latent(self, own_qkv: torch.Tensor, layer: int, norm: torch.Tensor | None, rank: int) -> torch.Tensor:
        assert norm is not None, "latents are always normalised"
        step, heads = self._current(), self._setup.heads
        wide = own_qkv.float().view(-1, heads + 1, self._setup.head_dim)
        plain, turned = wide[..., :rank], wide[..., rank:]
        plain = torch.cat([plain[:, :heads], self._unit(plain[:, heads:]) * norm], dim=1)
        turned = self._rotate(turned, torch.from_numpy(step.positions).to(own_qkv.device))
        whole = torch.cat([plain, turned], dim=-1).to(own_qkv.dtype)
        for row, (page, offset) in enumerate(zip(step.write_pages.tolist(), step.write_offsets.tolist(), strict=True)):
            self._setup.pool[page, layer, offset, 0, 0] = whole[row, heads]
        return whole.flatten(1)

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        step = self._current()
        query = qkv.float().view(qkv.shape[0], -1, self._setup.head_dim)[:, : self._setup.heads]
        out = torch.empty_like(query)
        for row, (length, table) in enumerate(zip(step.decode_lengths.tolist(), step.decode_pages, strict=True)):
            out[row : row + 1] = self._attend_one(query[row : row + 1], self._cached(torch.from_numpy(table), layer, length))
        for chunk in step.chunks:
            cached = self._cached(torch.from_numpy(chunk.pages), layer, chunk.cache_tokens)
            out[chunk.start : chunk.end] = self._attend_one(query[chunk.start : chunk.end], cached)
        return out[..., : self._setup.latent_rank].flatten(1).to(qkv.dtype)

    def logits(self, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        return self._product(x, head)

    def whole_step(self, weights: ModelWeights) -> WholeStep | None:
        return None

    def _current(self) -> Step:
        assert self._step is not None, "begin() comes before the layers"
        return self._step

    def _product(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        product = x.float() @ packed.weight.float().T
        if packed.scales is not None:
            product = product * packed.scales
        return product if packed.bias is None else product + packed.bias.float()

    def _updated(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate]) -> torch.Tensor:
        """One row after the other, so that none depends on its neighbours."""
        product = self._product(x, packed)
        for each in updates:
            for row in each.rows.tolist():
                inner = x[row].float() @ each.update.down.weight.T
                product[row] += inner @ each.update.up.weight.T
        return product

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._setup.rms_eps)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        setup = self._setup
        heads = qkv.view(qkv.shape[0], setup.heads + 2 * setup.kv_heads, setup.head_dim)
        keys_end = setup.heads + setup.kv_heads
        return heads[:, : setup.heads], heads[:, setup.heads : keys_end], heads[:, keys_end:]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cosines, sines = self._setup.rope[positions][:, None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    def _cached(self, table: torch.Tensor, layer: int, length: int) -> torch.Tensor:
        """float32 [length, 2, kv_heads, head_dim]; a latent is key and value."""
        return self._setup.pool[table, layer].flatten(0, 1)[:length].float().expand(-1, 2, -1, -1)

    def _attend_one(self, query: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """query [queries, heads, head_dim] are the last of cached [tokens, 2, kv_heads, head_dim]: they see no later one, and
        none that has left the window."""
        group = self._setup.heads // self._setup.kv_heads
        key, value = (cached[:, which].repeat_interleave(group, dim=1) for which in (0, 1))
        scores = torch.einsum("qhd,shd->hqs", query, key) * self._setup.scale
        tokens = torch.arange(cached.shape[0], device=cached.device)
        own = tokens[-query.shape[0] :, None]
        hidden = tokens[None, :] > own
        if self._setup.window is not None:
            hidden |= tokens[None, :] <= own - self._setup.window
        return torch.einsum("hqs,shd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


REGISTRATION = Registration(NAME, rank=0, fits=lambda device, dtype: True, build=ReferenceBackend)

"""The backend that needs nothing but torch: packed linears where oneDNN has them, gather and SDPA for attention."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.backend import Registration, RowsUpdate, Setup, WholeStep
from engine.model_weights import LowRank, ModelWeights, PackedLinear
from engine.quantisation import WeightQuantisation
from engine.step import Step
from engine.torch_chunk import LEAST_PRODUCT_QUERIES, ChunkAttention, ProductChunks, SdpaChunks, padded_keys, product_fits
from engine.torch_linear import Linears, QuantisedLinears, choose_linears, padded
from engine.torch_plan import ChunkPlan, DecodeBucket, Planner, StepPlan
from engine.torch_updates import TorchUpdates
from models.config import Activation

NAME = "torch"


class TorchBackend:
    """Implements engine.backend.Backend. Device neutral; only the host path is exercised by our tests."""

    name = NAME
    chunks_read_as_rows = False

    def __init__(self, setup: Setup) -> None:
        pages, layers, page_tokens = setup.pool.shape[:3]
        self._setup = setup
        self._linears = _linears(setup, setup.dtype)
        self._head_linears = _linears(setup, torch.float32)
        self._updates = TorchUpdates(setup.device)
        self._planner = Planner(setup)
        self._plan: StepPlan | None = None
        self._sdpa = SdpaChunks(setup)
        self._products = ProductChunks(setup) if product_fits(setup) else None
        self._silu = setup.activation is Activation.SILU
        self._page_rows = setup.pool.view(pages * layers, -1)
        self._token_rows = setup.pool.view(pages * layers * page_tokens, -1)
        self._page_tokens = page_tokens
        self._scale = setup.scale
        self._group = setup.heads // setup.kv_heads
        self._gathered = torch.empty(0, dtype=setup.dtype, device=setup.device)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._linears.pack(weight, bias)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._linears.pack(weight, bias)

    def pack_head(self, weight: torch.Tensor) -> PackedLinear:
        """Kept in float32: no CPU product of bfloat16 matrices in torch returns float32, and logits rounded to bfloat16 tie."""
        return self._head_linears.pack(weight.to(torch.float32), None)

    def pack_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return self._updates.pack(down, up)

    def pack_gate_up_update(self, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        return self._updates.pack(down, up)

    def begin(self, step: Step) -> None:
        self._plan = plan = self._planner.plan(step)
        self._sdpa.begin()
        if plan.fresh_pages is not None:
            self._setup.pool.index_fill_(0, plan.fresh_pages, 0)
        if plan.gathered_pages * self._page_rows.shape[1] > self._gathered.numel():
            self._gathered = self._page_rows.new_empty(plan.gathered_pages * self._page_rows.shape[1])

    def linear(self, x: torch.Tensor, packed: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        return self._updates.add(x, self._linears.apply(x, packed), updates)

    def linear_add(
        self, x: torch.Tensor, packed: PackedLinear, own_residual: torch.Tensor, updates: Sequence[RowsUpdate] = ()
    ) -> torch.Tensor:
        return own_residual.add_(self.linear(x, packed, updates))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[1],), weight, self._setup.rms_eps)

    def gated(self, x: torch.Tensor, gate_up: PackedLinear, updates: Sequence[RowsUpdate] = ()) -> torch.Tensor:
        gate, up = self.linear(x, gate_up, updates).chunk(2, dim=1)
        return (functional.silu(gate) if self._silu else functional.gelu(gate, approximate="tanh")).mul_(up)

    def rotate_and_store(self, own_qkv: torch.Tensor, layer: int, head_norms: torch.Tensor | None) -> torch.Tensor:
        plan, setup = self._current(), self._setup
        if setup.latent_rank is not None:
            return self._rotate_latent(own_qkv, layer, head_norms, setup.latent_rank)
        rotated = setup.heads + setup.kv_heads
        heads = own_qkv[:, : rotated * setup.head_dim].view(-1, rotated, setup.head_dim)
        wide = heads.to(torch.float32)
        if head_norms is not None:
            wide = functional.rms_norm(wide, (setup.head_dim,), None, setup.rms_eps).mul_(head_norms)
        turned = torch.mul(wide, plan.cosines).addcmul_(wide.roll(setup.head_dim // 2, -1), plan.signed_sines)
        heads.copy_(turned)
        return self._stored(own_qkv, layer)

    def _rotate_latent(self, own_qkv: torch.Tensor, layer: int, norm: torch.Tensor | None, rank: int) -> torch.Tensor:
        """The first `rank` values of the latent, behind the queries, are normalised; behind them everything is rotated."""
        plan, setup = self._current(), self._setup
        heads = own_qkv.view(-1, setup.heads + 1, setup.head_dim)
        latent = heads[:, setup.heads, :rank]
        latent.copy_(functional.rms_norm(latent.to(torch.float32), (rank,), norm, setup.rms_eps))
        wide = heads[..., rank:].to(torch.float32)
        heads[..., rank:].copy_(torch.mul(wide, plan.cosines).addcmul_(wide.roll(wide.shape[-1] // 2, -1), plan.signed_sines))
        return self._stored(own_qkv, layer)

    def _stored(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        rows = torch.add(self._current().write_rows, layer * self._page_tokens)
        self._token_rows.index_copy_(0, rows, qkv[:, self._setup.query_columns :])
        return qkv

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        plan = self._current()
        out = torch.empty((qkv.shape[0], self._setup.query_columns), dtype=qkv.dtype, device=qkv.device)
        for bucket in plan.buckets:
            self._attend_decode(qkv, layer, bucket, out)
        for chunk in plan.chunks:
            self._attend_chunk(qkv, layer, chunk, out)
        if self._setup.latent_rank is None:
            return out
        # Behind the rank the latents' positions were added up, which mean nothing.
        return out.view(-1, self._setup.heads, self._setup.head_dim)[..., : self._setup.latent_rank].flatten(1)

    def logits(self, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        return self._head_linears.apply(x.to(torch.float32), head)

    def whole_step(self, weights: ModelWeights) -> WholeStep | None:
        return None

    def _current(self) -> StepPlan:
        assert self._plan is not None, "begin() comes before the layers"
        return self._plan

    def _gather(self, page_rows: torch.Tensor, layer: int) -> torch.Tensor:
        """The pages of one layer, one after the other, [pages, page elements], in memory that the next gather reuses."""
        count, width = page_rows.shape[0], self._page_rows.shape[1]
        out = self._gathered[: count * width].view(count, width)
        return torch.index_select(self._page_rows, 0, torch.add(page_rows, layer), out=out)

    def _attend_decode(self, qkv: torch.Tensor, layer: int, bucket: DecodeBucket, out: torch.Tensor) -> None:
        """Query heads that share a key head stand where a sequence would have several queries: no key is copied for them."""
        setup = self._setup
        sequences = bucket.end - bucket.start
        cached = self._gather(bucket.page_rows, layer).view(sequences, -1, setup.vectors, setup.kv_heads, setup.head_dim)
        key, value = cached.expand(-1, -1, 2, -1, -1).transpose(1, 3).unbind(2)
        query = qkv[bucket.start : bucket.end, : setup.query_columns]
        query = query.view(sequences, setup.kv_heads, self._group, setup.head_dim)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bucket.mask, scale=self._scale)
        out[bucket.start : bucket.end].view(query.shape).copy_(mixed)

    def _attend_chunk(self, qkv: torch.Tensor, layer: int, chunk: ChunkPlan, out: torch.Tensor) -> None:
        setup = self._setup
        rows = qkv[chunk.start : chunk.end]
        query = rows[:, : setup.query_columns].view(-1, setup.heads, setup.head_dim)
        keys = padded_keys(chunk.cache_tokens)
        if chunk.page_rows is None:
            stored = rows[:, setup.query_columns :].view(-1, setup.vectors, setup.kv_heads, setup.head_dim)
            cached = padded(stored, keys)
        else:
            cached = self._gather(chunk.page_rows, layer).view(-1, setup.vectors, setup.kv_heads, setup.head_dim)[:keys]
        # A latent is key and value.
        cached = cached.expand(-1, 2, -1, -1)
        attention: ChunkAttention = self._sdpa
        if self._products is not None and query.shape[0] >= LEAST_PRODUCT_QUERIES:
            attention = self._products
        attention.attend(query, cached, chunk.cache_tokens, out[chunk.start : chunk.end].view(-1, setup.heads, setup.head_dim))


def _linears(setup: Setup, dtype: torch.dtype) -> Linears:
    plain = choose_linears(setup.device, dtype)
    return plain if setup.quantisation is WeightQuantisation.OFF else QuantisedLinears(plain)


REGISTRATION = Registration(NAME, rank=10, fits=lambda device, dtype: True, build=TorchBackend)

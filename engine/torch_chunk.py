"""Attention of prefill chunks in torch: scaled_dot_product_attention, or two oneDNN products a key head where that is faster."""

from typing import Protocol

import torch
from torch.nn import functional

from engine.backend import Setup
from engine.torch_linear import OneDnnLinears, choose_linears

# Queries multiplied at once. A block skips the keys behind its last query, so smaller blocks waste less and cost more calls.
PRODUCT_BLOCK_TOKENS = 128
# Keys are padded to a multiple of this: oneDNN prepares code for each new shape, which takes it about half a millisecond.
KEY_MULTIPLE_TOKENS = 64
# Below this many queries, widening keys and values to float32 costs more than faster products gain.
LEAST_PRODUCT_QUERIES = 64
# Most queries that share one mask: bounds a mask to this many rows of the context.
MASK_BLOCK_TOKENS = 1024


class ChunkAttention(Protocol):
    """Attention of the last queries of a sequence over all of it.

    query: [queries, heads, head_dim]; cached: [tokens, 2, kv_heads, head_dim], the queries' own rows last;
    out: [queries, heads, head_dim], written.
    """

    def attend(self, query: torch.Tensor, cached: torch.Tensor, out: torch.Tensor) -> None: ...


class SdpaChunks:
    """torch's own kernel. Masks are made once for each (queries, tokens) of a step: begin() forgets them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self) -> None:
        self._masks.clear()

    def attend(self, query: torch.Tensor, cached: torch.Tensor, out: torch.Tensor) -> None:
        past = cached.shape[0] - query.shape[0]
        key, value = cached[None].transpose(1, 3).unbind(2)
        heads_first = query[None].transpose(1, 2)
        for start in range(0, query.shape[0], MASK_BLOCK_TOKENS):
            end = min(start + MASK_BLOCK_TOKENS, query.shape[0])
            mask = self._mask(end - start, past + end) if past + start else None
            mixed = functional.scaled_dot_product_attention(
                heads_first[:, :, start:end],
                key[:, :, : past + end],
                value[:, :, : past + end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._setup.head_dim**-0.5,
                enable_gqa=True,
            )
            out[start:end].copy_(mixed[0].transpose(0, 1))

    def _mask(self, queries: int, tokens: int) -> torch.Tensor:
        """[queries, tokens] in the setup's dtype: -inf behind each query, the last query sees all."""
        mask = self._masks.get((queries, tokens))
        if mask is None:
            hidden = torch.ones(queries, tokens, dtype=torch.bool, device=self._setup.device).triu_(tokens - queries + 1)
            mask = torch.zeros(queries, tokens, dtype=self._setup.dtype, device=self._setup.device)
            mask = self._masks[queries, tokens] = mask.masked_fill_(hidden, float("-inf"))
        return mask


class ProductChunks:
    """Scores and sums as float32 oneDNN products, one key head at a time for all query heads that share it.

    torch's kernel multiplies with MKL, which is slow on CPUs of other makers; measured on AVX-512 without AMX, this takes 0.55
    to 0.75 of its time. With AMX the kernel's bfloat16 products are faster than any in float32.
    """

    def __init__(self, setup: Setup) -> None:
        self._scale = setup.head_dim**-0.5
        self._group = setup.heads // setup.kv_heads
        self._product = OneDnnLinears().multiply
        later = torch.full((PRODUCT_BLOCK_TOKENS, PRODUCT_BLOCK_TOKENS), float("-inf")).triu_(1)
        # [queries, any head, tokens from the first query of the block on]; the padding of keys lies behind every query.
        self._later = functional.pad(later, (0, KEY_MULTIPLE_TOKENS), value=float("-inf")).unsqueeze(1)

    def attend(self, query: torch.Tensor, cached: torch.Tensor, out: torch.Tensor) -> None:
        queries, kv_heads, head_dim = query.shape[0], cached.shape[2], cached.shape[3]
        past = cached.shape[0] - queries
        padded = cached.shape[0] + -cached.shape[0] % KEY_MULTIPLE_TOKENS
        keys = torch.zeros((kv_heads, padded, head_dim))
        keys[:, : cached.shape[0]].copy_(cached[:, 0].transpose(0, 1))
        values = torch.zeros((kv_heads, head_dim, padded))
        values[:, :, : cached.shape[0]].copy_(cached[:, 1].permute(1, 2, 0))
        wide_query = torch.empty((kv_heads, queries, self._group, head_dim))
        wide_query.copy_(query.view(queries, kv_heads, self._group, head_dim).transpose(0, 1)).mul_(self._scale)
        place = out.view(queries, kv_heads, self._group, head_dim)
        for start in range(0, queries, PRODUCT_BLOCK_TOKENS):
            end = min(start + PRODUCT_BLOCK_TOKENS, queries)
            tokens = past + end + -(past + end) % KEY_MULTIPLE_TOKENS
            later = self._later[: end - start, :, : tokens - past - start]
            for head in range(kv_heads):
                scores = self._product(wide_query[head, start:end].view(-1, head_dim), keys[head, :tokens])
                scores.view(end - start, self._group, tokens)[:, :, past + start :].add_(later)
                mixed = self._product(scores.softmax(-1), values[head, :, :tokens].contiguous())
                place[start:end, head].copy_(mixed.view(end - start, self._group, head_dim))


def product_fits(setup: Setup) -> bool:
    """Whether this host has packed products and no tile unit that makes torch's own kernel the faster one."""
    tiles = setup.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return not tiles and isinstance(choose_linears(setup.device, torch.float32), OneDnnLinears)

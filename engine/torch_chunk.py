"""Attention of prefill chunks in torch: scaled_dot_product_attention, or two oneDNN products a key head where that is faster."""

from typing import Protocol

import torch
from torch.nn import functional

from engine.backend import Setup
from engine.kernels import row_class
from engine.torch_linear import OneDnnLinears, choose_linears, padded

# Queries multiplied at once. A block skips the keys behind its last query, so smaller blocks waste less and cost more calls.
PRODUCT_BLOCK_TOKENS = 128
# Keys are padded to a multiple of this and queries to a class of rows: oneDNN prepares code for each new shape, which takes it
# half a millisecond and more, and torch's kernel keeps such code without any bound.
KEY_MULTIPLE_TOKENS = 64
# Queries of a last block are padded to a multiple of this where each number of them meets each number of keys.
QUERY_MULTIPLE_TOKENS = 32
# Below this many queries, widening keys and values to float32 costs more than faster products gain.
LEAST_PRODUCT_QUERIES = 64
# Most queries that share one mask: bounds a mask to this many rows of the context. Behind a window fewer, as each block takes
# the keys of all its queries' windows.
MASK_BLOCK_TOKENS = 1024
WINDOW_BLOCK_TOKENS = 256


class ChunkAttention(Protocol):
    """Attention of the last queries of a sequence over all of it.

    query: [queries, heads, head_dim]; cached: [padded_keys(tokens), 2, kv_heads, head_dim], finite, the queries' own rows are the
    last of its first `tokens`; out: [queries, heads, head_dim], written.
    """

    def attend(self, query: torch.Tensor, cached: torch.Tensor, tokens: int, out: torch.Tensor) -> None: ...


def padded_keys(tokens: int) -> int:
    """Keys that `tokens` are attended as."""
    return _up(tokens, KEY_MULTIPLE_TOKENS)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class SdpaChunks:
    """torch's own kernel. Masks are made once for each shape and place in a step: begin() forgets them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._block = MASK_BLOCK_TOKENS if setup.window is None else WINDOW_BLOCK_TOKENS
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def begin(self) -> None:
        self._masks.clear()

    def attend(self, query: torch.Tensor, cached: torch.Tensor, tokens: int, out: torch.Tensor) -> None:
        past, window = tokens - query.shape[0], self._setup.window
        key, value = cached[None].transpose(1, 3).unbind(2)
        for start in range(0, query.shape[0], self._block):
            end = min(start + self._block, query.shape[0])
            rows, keys, first = row_class(end - start), padded_keys(past + end), 0
            if window is not None:
                first = max(0, past + start + 1 - window) // KEY_MULTIPLE_TOKENS * KEY_MULTIPLE_TOKENS
            # Without a past and with all of it in the window the kernel needs no mask.
            plain = past + start == 0 and (window is None or end <= window)
            mask = None if plain else self._mask(rows, keys - first, past + start - first)
            mixed = functional.scaled_dot_product_attention(
                padded(query[start:end], rows)[None].transpose(1, 2),
                key[:, :, first:keys],
                value[:, :, first:keys],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._setup.scale,
                enable_gqa=True,
            )
            out[start:end].copy_(mixed[0, :, : end - start].transpose(0, 1))

    def _mask(self, queries: int, keys: int, past: int) -> torch.Tensor:
        """[queries, keys] in the setup's dtype: query i sees the first past + i + 1 keys, of these the window's; -inf hides the
        others."""
        mask = self._masks.get((queries, keys, past))
        if mask is None:
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=self._setup.device).triu_(past + 1)
            if self._setup.window is not None:
                hidden |= torch.ones_like(hidden).tril_(past - self._setup.window)
            mask = torch.zeros(queries, keys, dtype=self._setup.dtype, device=self._setup.device)
            mask = self._masks[queries, keys, past] = mask.masked_fill_(hidden, float("-inf"))
        return mask


class ProductChunks:
    """Scores and sums as float32 oneDNN products, one key head at a time for all query heads that share it.

    torch's kernel multiplies with MKL, which is slow on CPUs of other makers; measured on AVX-512 without AMX, this takes 0.55
    to 0.75 of its time. With AMX the kernel's bfloat16 products are faster than any in float32.
    """

    def __init__(self, setup: Setup) -> None:
        self._scale = setup.scale
        self._group = setup.heads // setup.kv_heads
        self._product = OneDnnLinears().multiply
        later = torch.full((PRODUCT_BLOCK_TOKENS, PRODUCT_BLOCK_TOKENS), float("-inf")).triu_(1)
        # [queries, any head, tokens from the first query of the block on]; the padding of keys lies behind every query.
        self._later = functional.pad(later, (0, KEY_MULTIPLE_TOKENS), value=float("-inf")).unsqueeze(1)

    def attend(self, query: torch.Tensor, cached: torch.Tensor, tokens: int, out: torch.Tensor) -> None:
        queries, kv_heads, head_dim = query.shape[0], cached.shape[2], cached.shape[3]
        past = tokens - queries
        keys = torch.empty((kv_heads, cached.shape[0], head_dim))
        keys.copy_(cached[:, 0].transpose(0, 1))
        values = torch.empty((kv_heads, head_dim, cached.shape[0]))
        values.copy_(cached[:, 1].permute(1, 2, 0))
        wide_query = torch.zeros((kv_heads, _up(queries, QUERY_MULTIPLE_TOKENS), self._group, head_dim))
        heads_first = query.view(queries, kv_heads, self._group, head_dim).transpose(0, 1)
        wide_query[:, :queries].copy_(heads_first).mul_(self._scale)
        place = out.view(queries, kv_heads, self._group, head_dim)
        for start in range(0, queries, PRODUCT_BLOCK_TOKENS):
            end = min(start + PRODUCT_BLOCK_TOKENS, queries)
            # Blocks before the last one are whole: only behind the last query there are rows of padding.
            rows, width = _up(end - start, QUERY_MULTIPLE_TOKENS), padded_keys(past + end)
            later = self._later[:rows, :, : width - past - start]
            for head in range(kv_heads):
                scores = self._product(wide_query[head, start : start + rows].view(-1, head_dim), keys[head, :width])
                scores.view(rows, self._group, width)[:, :, past + start :].add_(later)
                mixed = self._product(scores.softmax(-1), values[head, :, :width].contiguous())
                place[start:end, head].copy_(mixed.view(rows, self._group, head_dim)[: end - start])


def product_fits(setup: Setup) -> bool:
    """Whether this host has packed products and no tile unit that makes torch's own kernel the faster one; without a window."""
    if setup.window is not None:
        return False
    tiles = setup.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return not tiles and isinstance(choose_linears(setup.device, torch.float32), OneDnnLinears)

"""Attention with all scores at hand, for layers whose scores are capped or share their weights with sinks.

Slower than a backend's. Sums and weights are float32.
"""

import torch

from engine.module_attention import LayerView
from engine.step import Step

# Most scores of a head that exist at once, so that a long chunk behind a long past takes no memory of its own size.
SCORES_MAX = 1 << 20


class ScoredAttention:
    """Over the pages of one KV group: `dtype` [pages, layers, page_tokens, 2, kv_heads, head_dim]."""

    def __init__(self, pool: torch.Tensor, most_scores: int = SCORES_MAX) -> None:
        """most_scores: of a head, computed at once."""
        self._pool = pool
        self._most_scores = most_scores

    def attend(self, step: Step, layer: int, view: LayerView, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [T, heads, head_dim] of all rows of the step, whose KV is in the pages, to [T, heads, head_dim]."""
        out = torch.empty_like(query)
        for row, (length, table) in enumerate(zip(step.decode_lengths.tolist(), step.decode_pages, strict=True)):
            cached = self._cached(torch.from_numpy(table), layer, length)
            out[row : row + 1] = self._attend_one(query[row : row + 1], cached, view, sinks)
        for chunk in step.chunks:
            cached = self._cached(torch.from_numpy(chunk.pages), layer, chunk.cache_tokens)
            out[chunk.start : chunk.end] = self._attend_one(query[chunk.start : chunk.end], cached, view, sinks)
        return out

    def _cached(self, table: torch.Tensor, layer: int, length: int) -> torch.Tensor:
        """float32 [2, kv_heads, length, head_dim]."""
        pages = self._pool[table.to(self._pool.device), layer]
        return pages.flatten(0, 1)[:length].float().permute(1, 2, 0, 3)

    def _attend_one(self, query: torch.Tensor, cached: torch.Tensor, view: LayerView, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [queries, heads, head_dim] are the last of cached [2, kv_heads, tokens, head_dim]."""
        kv_heads, tokens = cached.shape[1:3]
        past = tokens - query.shape[0]
        block = max(1, self._most_scores // tokens)
        places = torch.arange(tokens, device=query.device)
        parts = []
        for start in range(0, query.shape[0], block):
            own = query[start : start + block].float()
            # [kv_heads, queries, heads of one key head, head_dim], to meet the keys of that head.
            grouped = own.view(own.shape[0], kv_heads, -1, own.shape[2]).transpose(0, 1)
            scores = torch.einsum("kqgd,ksd->kgqs", grouped, cached[0]) * view.scale
            if view.cap is not None:
                scores = view.cap * torch.tanh(scores / view.cap)
            ends = past + start + torch.arange(own.shape[0], device=query.device)[:, None]
            hidden = places > ends
            if view.window is not None:
                hidden |= places <= ends - view.window
            weights = _weights(scores.masked_fill(hidden, float("-inf")), sinks)
            parts.append(torch.einsum("kgqs,ksd->qkgd", weights, cached[1]).flatten(1, 2))
        return torch.cat(parts).to(query.dtype)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of [kv_heads, heads of one key head, queries, tokens]; the share of a head's sink is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, group, queries, _ = scores.shape
    column = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, queries, -1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]

"""Attention over latent vectors as attention of one key head: what makes keys and values of a latent is put into the products
before and behind attention, when a model is loaded.

With q and k made of x by Q and of the latent c by K, q k = x Q' K c: the product Q' K makes queries that meet the latent itself.
With values made of the latent by V and the output by O, O V does the same behind attention. (https://arxiv.org/abs/2405.04434,
section 2.1.2.) Products of weights are float32.
"""

from dataclasses import dataclass

import torch

from models.config import LatentConfig


@dataclass(frozen=True, slots=True)
class LatentProducts:
    """queries: [heads * (rank + rope_dim), in]; latent: [rank + rope_dim, hidden]; output: [hidden, heads * rank]. float32."""

    queries: torch.Tensor
    latent: torch.Tensor
    output: torch.Tensor


def absorbed(
    latent: LatentConfig, heads: int, query: torch.Tensor, down: torch.Tensor, up: torch.Tensor, output: torch.Tensor
) -> LatentProducts:
    """query: [heads * (nope_dim + rope_dim), in]; down: [rank + rope_dim, hidden]; up: [heads * (nope_dim + value_dim), rank];
    output: [hidden, heads * value_dim]. Pairs of rotated values come out as halves."""
    query = query.float().view(heads, latent.nope_dim + latent.rope_dim, -1)
    made = up.float().view(heads, latent.nope_dim + latent.value_dim, latent.rank)
    keys, values = made[:, : latent.nope_dim], made[:, latent.nope_dim :]
    met = torch.einsum("hnr,hni->hri", keys, query[:, : latent.nope_dim])
    queries = torch.cat([met, _halves(query[:, latent.nope_dim :], latent)], dim=1).flatten(0, 1)
    down = down.float()
    latents = torch.cat([down[: latent.rank], _halves(down[latent.rank :], latent)])
    out = torch.einsum("ohv,hvr->ohr", output.float().view(-1, heads, latent.value_dim), values)
    return LatentProducts(queries, latents, out.flatten(1))


def _halves(rows: torch.Tensor, latent: LatentConfig) -> torch.Tensor:
    """Rows [..., rope_dim, in] from [pair 0 first, pair 0 second, pair 1 first, ...] to all firsts, then all seconds."""
    if not latent.rope_interleaved:
        return rows
    pairs = rows.view(*rows.shape[:-2], latent.rope_dim // 2, 2, rows.shape[-1])
    return pairs.transpose(-3, -2).reshape(rows.shape)

"""What the torch backend derives from a step once, so that its layers only add an offset: indices, masks, rotations."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.backend import Setup
from engine.layout import pages_for
from engine.step import NULL_PAGE, Chunk, Ints, Step
from engine.torch_chunk import padded_keys

# Rows of one bucket are padded to its longest. A new bucket costs about as much as attending this many more tokens.
BUCKET_PADDING_TOKENS = 256
# Most bytes of keys and values gathered at once for several sequences (one sequence may need more).
GATHER_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows start..end-1.

    page_rows: int64 [sequences * pages], rows of layer 0 in the pool seen as one row per page and layer.
    mask: [sequences, 1, 1, tokens] in the pool's dtype, 0 or -inf; none where every row fills its pages and sees them all.
    """

    start: int
    end: int
    page_rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A prefill chunk at packed rows start..end-1. page_rows is None when it is all of the sequence so far, else its pages and as
    many null pages as padded_keys(cache_tokens) need."""

    start: int
    end: int
    cache_tokens: int
    page_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """cosines, signed_sines: float32 [T, 1, head_dim].

    write_rows: int64 [T], rows of layer 0 in the pool seen as one row per token.
    gathered_pages: most pages that any gather of the step takes.
    """

    cosines: torch.Tensor
    signed_sines: torch.Tensor
    write_rows: torch.Tensor
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[ChunkPlan, ...]
    fresh_pages: torch.Tensor | None
    gathered_pages: int


class Planner:
    """Builds StepPlans for one setup."""

    def __init__(self, setup: Setup) -> None:
        _, self._layers, self._page_tokens, _, _, _ = setup.pool.shape
        self._setup = setup
        page_bytes = setup.pool[0, 0].numel() * setup.pool.element_size()
        self._bucket_pages = max(1, GATHER_BYTES // page_bytes)

    def plan(self, step: Step) -> StepPlan:
        cosines, sines = self._setup.rope.index_select(0, self._tensor(step.positions)).unsqueeze(1).chunk(2, dim=-1)
        write_rows = step.write_pages * (self._layers * self._page_tokens) + step.write_offsets
        buckets = tuple(self._bucket(step, start, end) for start, end in self._bounds(step))
        chunks = tuple(self._chunk(chunk) for chunk in step.chunks)
        gathers = [bucket.page_rows.shape[0] for bucket in buckets]
        gathers += [chunk.page_rows.shape[0] for chunk in chunks if chunk.page_rows is not None]
        return StepPlan(
            cosines=torch.cat([cosines, cosines], dim=-1),
            signed_sines=torch.cat([-sines, sines], dim=-1),
            write_rows=self._tensor(write_rows),
            buckets=buckets,
            chunks=chunks,
            fresh_pages=self._tensor(step.fresh_pages) if step.fresh_pages.size else None,
            gathered_pages=max(gathers, default=0),
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._setup.device)

    def _bounds(self, step: Step) -> Iterator[tuple[int, int]]:
        """Slices of the decode rows, longest first: rows join a bucket until its padding or its size passes the limit.

        Behind a window rows are of nearly one length, and the last is not always the longest.
        """
        counts = (-(-step.decode_lengths // self._page_tokens)).tolist()
        end, padding, longest = len(counts), 0, 0
        for row in range(len(counts) - 1, -1, -1):
            longer = max(0, counts[row] - longest)
            padding += (longer * (end - 1 - row) + max(0, longest - counts[row])) * self._page_tokens
            longest += longer
            if padding > BUCKET_PADDING_TOKENS or (end - row > 1 and (end - row) * longest > self._bucket_pages):
                yield row + 1, end
                end, padding, longest = row + 1, 0, counts[row]
        if end:
            yield 0, end

    def _bucket(self, step: Step, start: int, end: int) -> DecodeBucket:
        lengths = step.decode_lengths[start:end]
        pages = int(-(-lengths.max() // self._page_tokens))
        page_rows = step.decode_pages[start:end, :pages].reshape(-1) * self._layers
        tokens = pages * self._page_tokens
        mask, window = None, self._setup.window
        if lengths.min() < tokens or (window is not None and lengths.max() > window):
            places = np.arange(tokens)
            hidden = places >= lengths[:, None]
            if window is not None:
                hidden |= places < lengths[:, None] - window
            mask = self._mask(torch.from_numpy(hidden)).view(end - start, 1, 1, tokens)
        return DecodeBucket(start, end, self._tensor(page_rows), mask)

    def _chunk(self, chunk: Chunk) -> ChunkPlan:
        page_rows = None
        if chunk.first_position:
            pages = np.full(pages_for(padded_keys(chunk.cache_tokens), self._page_tokens), NULL_PAGE, dtype=np.int64)
            pages[: chunk.pages.size] = chunk.pages
            page_rows = self._tensor(pages * self._layers)
        return ChunkPlan(chunk.start, chunk.end, chunk.cache_tokens, page_rows)

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._setup.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._setup.device)

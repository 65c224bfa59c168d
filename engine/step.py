"""Host side of a step: a batch becomes a few integer arrays that every backend understands.

Numpy only, no loop over tokens: this runs before every step. The order of packed rows is: decode rows by growing cache length,
then chunks, so that rows of like length are neighbours and attention can take them as slices.

A model with several KV groups has a step for each, over the same rows. Behind a window only the pages that something still
sees are in a step: lengths and positions of attention count from the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, Rows
from engine.layout import first_visible_page, pages_for

Ints = NDArray[np.int64]
NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a batch is checked against; anything else is the caller's bug and raises ValueError. page_tokens to
    window: of one group. adapters: names of those that rows may have."""

    vocabulary_size: int
    context_tokens: int
    page_tokens: int
    total_pages: int
    window: int | None = None
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Two or more tokens of one sequence, packed at rows start..end-1. `pages`: those that its tokens see, up to the last one's.

    first_position: of its first token, counted from the first token of the first of these pages.
    """

    start: int
    end: int
    first_position: int
    pages: Ints

    @property
    def cache_tokens(self) -> int:
        """Tokens in `pages`, those of the chunk included."""
        return self.first_position + self.end - self.start


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """All rows of a step that one adapter computes. rows: int64, ascending."""

    adapter: str
    rows: Ints


@dataclass(frozen=True, slots=True)
class Step:
    """One packed step of T rows, of which the first `len(decode_lengths)` are single tokens, as one KV group sees it.

    token_ids, positions: int64 [T].
    write_pages, write_offsets: int64 [T], the page and the place in it where a row's KV goes.
    decode_lengths: int64 [B], tokens in the pages that each decode row sees, itself included; ascending without a window.
    decode_pages: int64 [B, most pages], page tables padded with the null page.
    fresh_pages: pages that are begun and not filled in this step; they are cleared first.
    logit_rows: int64 [R], packed rows whose logits are wanted, in the order of the batch.
    adapted: the rows that have adapters, by adapter; of the others none. adapted_logits: the same among logit_rows.
    """

    token_ids: Ints
    positions: Ints
    write_pages: Ints
    write_offsets: Ints
    decode_lengths: Ints
    decode_pages: Ints
    chunks: tuple[Chunk, ...]
    fresh_pages: Ints
    logit_rows: Ints
    adapted: tuple[AdapterRows, ...] = ()
    adapted_logits: tuple[AdapterRows, ...] = ()


@dataclass(frozen=True, slots=True)
class _Packed:
    """The rows of a step in their order, for all groups. ends: int64 [B], tokens of decode sequences, the new one included."""

    decode: Sequence[Rows]
    chunked: Sequence[Rows]
    ends: Ints
    token_ids: Ints
    positions: Ints
    logit_rows: Ints
    adapted: tuple[AdapterRows, ...]
    adapted_logits: tuple[AdapterRows, ...]


def build_step(batch: Batch, limits: StepLimits) -> Step:
    """Check the batch of a model with one KV group and pack it. Raises ValueError naming the sequence and the limit."""
    return build_steps(batch, (limits,))[0]


def build_steps(batch: Batch, limits: Sequence[StepLimits]) -> tuple[Step, ...]:
    """Check the batch and pack it for each KV group. Raises ValueError naming the sequence and the limit."""
    for rows in batch.rows:
        _check_reach(rows, limits)
    packed = _pack(batch)
    if packed.token_ids.min() < 0 or packed.token_ids.max() >= limits[0].vocabulary_size:
        raise ValueError(f"a token id is outside 0..{limits[0].vocabulary_size - 1}; the vocabulary has no such token")
    return tuple(_group_step(packed, group, each) for group, each in enumerate(limits))


def _pack(batch: Batch) -> _Packed:
    decode = sorted((rows for rows in batch.rows if len(rows.token_ids) == 1), key=attrgetter("end_position"))
    chunked = [rows for rows in batch.rows if len(rows.token_ids) > 1]
    ends = np.array([rows.end_position for rows in decode], dtype=np.int64)
    chunk_positions = (np.arange(rows.first_position, rows.end_position, dtype=np.int64) for rows in chunked)
    positions = np.concatenate([ends - 1, *chunk_positions])
    token_ids = np.fromiter(chain.from_iterable(rows.token_ids for rows in chain(decode, chunked)), np.int64, positions.size)
    logit_rows = _logit_rows(batch, decode, chunked)
    adapted = _adapted(decode, chunked) if any(rows.adapter for rows in batch.rows) else ()
    return _Packed(decode, chunked, ends, token_ids, positions, logit_rows, adapted, _adapted_among(logit_rows, adapted))


def _adapted(decode: Sequence[Rows], chunked: Sequence[Rows]) -> tuple[AdapterRows, ...]:
    spans: dict[str, list[Ints]] = {}
    start = 0
    for rows in chain(decode, chunked):
        end = start + len(rows.token_ids)
        if rows.adapter:
            spans.setdefault(rows.adapter, []).append(np.arange(start, end, dtype=np.int64))
        start = end
    return tuple(AdapterRows(adapter, np.concatenate(spans[adapter])) for adapter in sorted(spans))


def _adapted_among(wanted: Ints, adapted: Sequence[AdapterRows]) -> tuple[AdapterRows, ...]:
    """The places in `wanted` of the rows that have adapters."""
    places = ((each.adapter, np.flatnonzero(np.isin(wanted, each.rows))) for each in adapted)
    return tuple(AdapterRows(adapter, rows) for adapter, rows in places if rows.size)


def _group_step(packed: _Packed, group: int, limits: StepLimits) -> Step:
    starts = _first_pages(packed.ends, limits)
    tables = _padded_tables(packed, group, starts, limits.page_tokens)
    chunks = _chunks(packed, group, limits)
    page_indices, offsets = np.divmod(packed.positions, limits.page_tokens)
    rows = len(packed.decode)
    writes = [tables[np.arange(rows), page_indices[:rows] - starts]]
    for chunk in chunks:
        own = page_indices[chunk.start : chunk.end]
        writes.append(chunk.pages[own - own[0] + chunk.first_position // limits.page_tokens])
    write_pages = np.concatenate(writes)
    lengths = packed.ends - starts * limits.page_tokens
    _check_pages(tables, lengths, chunks, limits)
    return Step(
        token_ids=packed.token_ids,
        positions=packed.positions,
        write_pages=write_pages,
        write_offsets=offsets,
        decode_lengths=lengths,
        decode_pages=tables,
        chunks=chunks,
        fresh_pages=_fresh_pages(write_pages, offsets, limits.page_tokens),
        logit_rows=packed.logit_rows,
        adapted=packed.adapted,
        adapted_logits=packed.adapted_logits,
    )


def _check_reach(rows: Rows, limits: Sequence[StepLimits]) -> None:
    end, context_tokens = rows.end_position, limits[0].context_tokens
    if rows.adapter and rows.adapter not in limits[0].adapters:
        raise ValueError(f"sequence {rows.sequence} has the adapter {rows.adapter!r}, which is not loaded")
    if end > context_tokens:
        raise ValueError(f"sequence {rows.sequence} reaches {end} tokens; context_tokens is {context_tokens}")
    if len(rows.pages) != len(limits):
        groups = f"{len(limits)} KV group{'s' if len(limits) > 1 else ''}"
        raise ValueError(f"sequence {rows.sequence} has {len(rows.pages)} page tables; this model has {groups}")
    for table, each in zip(rows.pages, limits, strict=True):
        if len(table) * each.page_tokens < end:
            raise ValueError(
                f"the page table of sequence {rows.sequence} has {len(table)} pages of {each.page_tokens} tokens; "
                f"{end} tokens need {pages_for(end, each.page_tokens)}"
            )


def _first_pages(ends: Ints, limits: StepLimits) -> Ints:
    """Number of the first page that each decode row sees (engine.layout.first_visible_page)."""
    if limits.window is None:
        return np.zeros_like(ends)
    return np.maximum(0, ends - limits.window) // limits.page_tokens


def _padded_tables(packed: _Packed, group: int, starts: Ints, page_tokens: int) -> Ints:
    if not packed.decode:
        return np.zeros((0, 0), dtype=np.int64)
    ends = -(-packed.ends // page_tokens)
    bounds = zip(packed.decode, starts.tolist(), ends.tolist(), strict=True)
    used = [rows.pages[group][start:end] for rows, start, end in bounds]
    counts = ends - starts
    flat = np.fromiter(chain.from_iterable(used), np.int64, int(counts.sum()))
    tables = np.full((len(used), int(counts.max())), NULL_PAGE, dtype=np.int64)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables


def _chunks(packed: _Packed, group: int, limits: StepLimits) -> tuple[Chunk, ...]:
    chunks = []
    start = len(packed.decode)
    for rows in packed.chunked:
        first = first_visible_page(rows.first_position, limits.window, limits.page_tokens)
        pages = rows.pages[group][first : pages_for(rows.end_position, limits.page_tokens)]
        end = start + len(rows.token_ids)
        position = rows.first_position - first * limits.page_tokens
        chunks.append(Chunk(start, end, position, np.array(pages, dtype=np.int64)))
        start = end
    return tuple(chunks)


def _check_pages(tables: Ints, lengths: Ints, chunks: Sequence[Chunk], limits: StepLimits) -> None:
    in_use = np.concatenate(
        [
            tables[np.arange(tables.shape[1]) < (-(-lengths // limits.page_tokens))[:, None]],
            *(chunk.pages for chunk in chunks),
        ]
    )
    if in_use.min() <= NULL_PAGE or in_use.max() >= limits.total_pages:
        raise ValueError(f"a page id is outside 1..{limits.total_pages - 1}; page 0 is the null page and is never owned")


def _fresh_pages(write_pages: Ints, offsets: Ints, page_tokens: int) -> Ints:
    """Pages whose first row is written now and whose last row is not.

    Attention reads whole pages and masks what is beyond the sequence; a NaN left there by an earlier owner would still
    spread through the mask, so a page starts out as zeros.
    """
    begun = write_pages[offsets == 0]
    return np.setdiff1d(begun, write_pages[offsets == page_tokens - 1]) if begun.size else begun


def _logit_rows(batch: Batch, decode: Sequence[Rows], chunked: Sequence[Rows]) -> Ints:
    spans = {rows.sequence: range(row, row + 1) for row, rows in enumerate(decode)}
    row = len(decode)
    for rows in chunked:
        spans[rows.sequence] = range(row, row + len(rows.token_ids))
        row += len(rows.token_ids)
    told = ((spans[rows.sequence], rows.all_logits or rows.draft_tokens > 0) for rows in batch.rows if rows.wants_logits)
    return np.fromiter(chain.from_iterable(span if every else span[-1:] for span, every in told), np.int64)

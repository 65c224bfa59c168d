"""Host side of a step: a batch becomes a few integer arrays that every backend understands.

Numpy only, no loop over tokens: this runs before every step. The order of packed rows is: decode rows by growing cache length,
then chunks, so that rows of like length are neighbours and attention can take them as slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, Rows
from engine.layout import pages_for

Ints = NDArray[np.int64]
NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a batch is checked against; anything outside is the caller's bug and raises ValueError."""

    vocabulary_size: int
    context_tokens: int
    page_tokens: int
    total_pages: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Two or more tokens of one sequence, packed at rows start..end-1. `pages` covers everything up to the chunk's last token."""

    start: int
    end: int
    first_position: int
    pages: Ints

    @property
    def cache_tokens(self) -> int:
        """Tokens that the chunk's last token attends to, itself included."""
        return self.first_position + self.end - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """One packed step of T rows, of which the first `len(decode_lengths)` are single tokens.

    token_ids, positions: int64 [T].
    write_pages, write_offsets: int64 [T], the page and the place in it where a row's KV goes.
    decode_lengths: int64 [B] ascending, tokens each decode row attends to, itself included.
    decode_pages: int64 [B, most pages], page tables padded with the null page.
    fresh_pages: pages that are begun and not filled in this step; they are cleared first.
    logit_rows: int64 [R], packed rows whose logits are wanted, in the order of the batch.
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


def build_step(batch: Batch, limits: StepLimits) -> Step:
    """Check the batch and pack it. Raises ValueError naming the sequence and the limit."""
    decode = sorted((rows for rows in batch.rows if len(rows.token_ids) == 1), key=attrgetter("end_position"))
    chunked = [rows for rows in batch.rows if len(rows.token_ids) > 1]
    for rows in batch.rows:
        _check_reach(rows, limits)
    lengths = np.array([rows.end_position for rows in decode], dtype=np.int64)
    tables = _padded_tables(decode, lengths, limits.page_tokens)
    chunks = _chunks(chunked, len(decode), limits.page_tokens)
    positions = np.concatenate([lengths - 1, *(np.arange(c.first_position, c.cache_tokens, dtype=np.int64) for c in chunks)])
    token_ids = np.fromiter(chain.from_iterable(rows.token_ids for rows in chain(decode, chunked)), np.int64, positions.size)
    page_indices, offsets = np.divmod(positions, limits.page_tokens)
    write_pages = np.concatenate(
        [
            tables[np.arange(len(decode)), page_indices[: len(decode)]],
            *(c.pages[page_indices[c.start : c.end]] for c in chunks),
        ]
    )
    _check_ids(token_ids, tables, lengths, chunks, limits)
    return Step(
        token_ids=token_ids,
        positions=positions,
        write_pages=write_pages,
        write_offsets=offsets,
        decode_lengths=lengths,
        decode_pages=tables,
        chunks=chunks,
        fresh_pages=_fresh_pages(write_pages, offsets, limits.page_tokens),
        logit_rows=_logit_rows(batch, decode, chunked, chunks),
    )


def _check_reach(rows: Rows, limits: StepLimits) -> None:
    end = rows.end_position
    if end > limits.context_tokens:
        raise ValueError(f"sequence {rows.sequence} reaches {end} tokens; context_tokens is {limits.context_tokens}")
    if len(rows.pages) != 1:
        raise ValueError(f"sequence {rows.sequence} has {len(rows.pages)} page tables; this model has 1 KV group")
    if len(rows.pages[0]) * limits.page_tokens < end:
        raise ValueError(
            f"the page table of sequence {rows.sequence} has {len(rows.pages[0])} pages of {limits.page_tokens} tokens; "
            f"{end} tokens need {pages_for(end, limits.page_tokens)}"
        )


def _padded_tables(decode: Sequence[Rows], lengths: Ints, page_tokens: int) -> Ints:
    if not decode:
        return np.zeros((0, 0), dtype=np.int64)
    counts = -(-lengths // page_tokens)
    used = [rows.pages[0][:count] for rows, count in zip(decode, counts.tolist(), strict=True)]
    flat = np.fromiter(chain.from_iterable(used), np.int64, int(counts.sum()))
    tables = np.full((len(decode), int(counts[-1])), NULL_PAGE, dtype=np.int64)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables


def _chunks(chunked: Sequence[Rows], first_row: int, page_tokens: int) -> tuple[Chunk, ...]:
    chunks = []
    start = first_row
    for rows in chunked:
        count = pages_for(rows.end_position, page_tokens)
        end = start + len(rows.token_ids)
        chunks.append(Chunk(start, end, rows.first_position, np.array(rows.pages[0][:count], dtype=np.int64)))
        start = end
    return tuple(chunks)


def _check_ids(token_ids: Ints, tables: Ints, lengths: Ints, chunks: Sequence[Chunk], limits: StepLimits) -> None:
    if token_ids.min() < 0 or token_ids.max() >= limits.vocabulary_size:
        raise ValueError(f"a token id is outside 0..{limits.vocabulary_size - 1}; the vocabulary has no such token")
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


def _logit_rows(batch: Batch, decode: Sequence[Rows], chunked: Sequence[Rows], chunks: Sequence[Chunk]) -> Ints:
    last_rows = {rows.sequence: row for row, rows in enumerate(decode)}
    last_rows.update((rows.sequence, chunk.end - 1) for rows, chunk in zip(chunked, chunks, strict=True))
    return np.array([last_rows[rows.sequence] for rows in batch.rows if rows.wants_logits], dtype=np.int64)

"""Grants and memory maps for tests of the hand-over."""

import secrets

from kv_transfer.offer import Grant, GrantPages, LayoutView, Peer, Slab, endpoint_of
from kv_transfer.plan import SourceMemory
from lifecycle.record import AttemptKey

FINGERPRINT = "ab" * 16
PAGE_BYTES = 368_640
ROW_BYTES = 196_608
READER_BASE, WRITER_BASE = 1 << 30, 1 << 40


def layout(*page_tokens: int) -> LayoutView:
    """A layout with one group for each page size."""
    return LayoutView(FINGERPRINT, page_tokens or (16,))


def slabs(base: int, page_bytes: tuple[int, ...] = (PAGE_BYTES,), pages: int = 4096) -> tuple[Slab, ...]:
    """Page slabs and a landing slab, far apart."""
    made = [Slab(base * (i + 1), size * pages, size) for i, size in enumerate(page_bytes)]
    return (*made, Slab(base * (len(page_bytes) + 1), ROW_BYTES * 8, ROW_BYTES))


def source(page_tokens: tuple[int, ...] = (16,), page_bytes: tuple[int, ...] = (PAGE_BYTES,)) -> SourceMemory:
    """The writer's side."""
    *pages, landing = slabs(WRITER_BASE, page_bytes)
    return SourceMemory(LayoutView(FINGERPRINT, page_tokens), tuple(pages), landing)


def grant(
    first_position: int = 0,
    token_count: int = 100,
    page_tokens: tuple[int, ...] = (16,),
    page_bytes: tuple[int, ...] = (PAGE_BYTES,),
    page_ids: tuple[tuple[int, ...], ...] | None = None,
) -> Grant:
    """A grant that fits, with pages 10, 11, ... in each group unless given."""
    if page_ids is None:
        counts = [-(-token_count // size) - -(-first_position // size) for size in page_tokens]
        page_ids = tuple(tuple(range(10, 10 + count)) for count in counts)
    groups = tuple(GrantPages(ids, tuple(int(p > 0) for p in ids)) for ids in page_ids)
    return Grant(
        grant_id=secrets.token_hex(16),
        key=AttemptKey("request", 1),
        decode=Peer("decode", "decode-1", "decode:1"),
        layout_fingerprint=FINGERPRINT,
        first_position=first_position,
        token_count=token_count,
        groups=groups,
        landing_row=5,
        endpoint=endpoint_of("agent", b"metadata", slabs(READER_BASE, page_bytes)),
        expires_after_s=30.0,
    )

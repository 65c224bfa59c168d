"""What is written where: a hand-over cut into parts, mapped by token position, and the notice that goes with each part.

A page is found on both sides by its page number (position // page_tokens), never by its index in a list nor from an end: a reader
that already has a prefix, or that keeps one page more for the next token, can then shift nothing.
"""

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kv_transfer.offer import (
    FINGERPRINT_BYTES,
    GRANT_ID_BYTES,
    GROUPS_MAX,
    NULL_PAGE,
    BadGrant,
    Grant,
    HandoverError,
    LayoutView,
    Slab,
    check_layout,
)
from kv_transfer.ports import Push, Range

# Bounds what one writer that was cut off can still write, and how long one post holds the agent's lock.
TRANSFER_BYTES_MAX = 2 * 1024 * 1024
# A page lies layer by layer, so a step that is under way has finished its front: pages are sent in so many pieces, the front ones
# while the step goes on. Both sides count parts, so this is a part of the protocol.
LAYER_PIECES = 3
# Smaller pieces cost more in calls than they hide.
PIECE_BYTES_MIN = 64 * 1024

NOTICE_MAGIC = b"TKVN"
# 2: pages travel in pieces, and `part` counts those.
NOTICE_VERSION = 2
_NOTICE_HEAD = struct.Struct(f"<4sBB?x{GRANT_ID_BYTES}sIII{FINGERPRINT_BYTES}s")
_NOTICE_CRC = struct.Struct("<I")


class BadNotice(HandoverError):
    """Bytes that are not a notice of this version."""


class SourceMissing(HandoverError):
    """The writer's page table has no page for a position that the grant asks for."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What the reader is told when a part has been written. page_counts: pages sent in all, per KV group.

    content_crc32: CRC-32 of the bytes of this part, where the writer was told to send it.
    """

    grant_id: str
    part: int
    parts: int
    token_count: int
    page_counts: tuple[int, ...]
    layout_fingerprint: str
    content_crc32: int | None = None

    def to_bytes(self) -> bytes:
        """The wire form, little-endian, closed by a CRC-32."""
        head = _NOTICE_HEAD.pack(
            NOTICE_MAGIC,
            NOTICE_VERSION,
            len(self.page_counts),
            self.content_crc32 is not None,
            bytes.fromhex(self.grant_id),
            self.part,
            self.parts,
            self.token_count,
            bytes.fromhex(self.layout_fingerprint),
        )
        words = self.page_counts if self.content_crc32 is None else (*self.page_counts, self.content_crc32)
        body = head + struct.pack(f"<{len(words)}I", *words)
        return body + _NOTICE_CRC.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Notice":
        """Raises BadNotice for anything that to_bytes could not have made."""
        if len(data) < _NOTICE_HEAD.size + _NOTICE_CRC.size:
            raise BadNotice(f"{len(data)} bytes are too few for a notice")
        magic, version, groups, has_content, grant_id, part, parts, tokens, fingerprint = _NOTICE_HEAD.unpack_from(data)
        if magic != NOTICE_MAGIC or version != NOTICE_VERSION:
            raise BadNotice(f"not a notice of version {NOTICE_VERSION}: starts with {bytes(data[:5])!r}")
        if not 1 <= groups <= GROUPS_MAX or len(data) != _NOTICE_HEAD.size + 4 * (groups + has_content) + _NOTICE_CRC.size:
            raise BadNotice(f"{len(data)} bytes do not fit {groups} groups")
        body = data[: -_NOTICE_CRC.size]
        if zlib.crc32(body) != _NOTICE_CRC.unpack(data[-_NOTICE_CRC.size :])[0]:
            raise BadNotice("the checksum does not match")
        words = struct.unpack_from(f"<{groups + has_content}I", data, _NOTICE_HEAD.size)
        content = words[groups] if has_content else None
        notice = cls(grant_id.hex(), part, parts, tokens, words[:groups], fingerprint.hex(), content)
        if notice.to_bytes() != bytes(data) or not part < parts:
            raise BadNotice(f"part {part} of {parts} is not a part")
        return notice


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """The writer's side: its layout, its slab per KV group, its slab of logits rows (float32 [rows, vocabulary]).

    content: gives the CRC-32 of what lies at the local addresses; None sends no checksums of content.
    """

    layout: LayoutView
    slabs: tuple[Slab, ...]
    landing: Slab
    content: Callable[[Sequence[Range]], int] | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """How far a prompt is: positions 0..tokens in all layers, and 0..step_tokens in the first `layers` of `of_layers`."""

    tokens: int
    step_tokens: int = 0
    layers: int = 0
    of_layers: int = 1


@dataclass(frozen=True, slots=True)
class PagePart:
    """A part that carries the same piece (some layers) of several pages of one group.

    page_numbers: position // page_tokens of each page. offset_bytes, size_bytes: the piece of each page that is sent.
    ready_tokens: the part may be sent once so many positions of the prompt are computed.
    """

    index: int
    group: int
    page_numbers: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class LandingPart:
    """The last part, when the grant has a landing row: the logits row of the last prompt position."""

    index: int
    ready_tokens: int


Part = PagePart | LandingPart


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """All parts of one hand-over, those of earlier positions first. Made once, before anything is computed."""

    grant: Grant
    source: SourceMemory
    parts: tuple[Part, ...]
    #: Pages that are sent, per KV group. Counted once: every notice says it.
    page_counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_counts", sent_page_counts(self.grant))

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        pages = sum(p.size_bytes * len(p.page_numbers) for p in self.parts if isinstance(p, PagePart))
        return pages + (self.source.landing.unit_bytes if self.grant.landing_row is not None else 0)

    def ready(self, computed: Computed, first: int = 0) -> tuple[int, ...]:
        """The parts from `first` on that may be sent now, in order. Parts that are far from ready are not looked at.

        The last page of a prompt may be partly filled: it is ready when the whole prompt is, and so is the landing row, which
        a step makes last.
        """
        most = max(computed.tokens, computed.step_tokens)
        end = bisect_right(self.parts, most, lo=first, key=lambda part: part.ready_tokens)
        return tuple(part.index for part in self.parts[first:end] if self._is_ready(part, computed))

    def _is_ready(self, part: Part, computed: Computed) -> bool:
        if part.ready_tokens <= computed.tokens:
            return True
        if isinstance(part, LandingPart) or part.ready_tokens > computed.step_tokens:
            return False
        page_bytes = self.source.slabs[part.group].unit_bytes
        return (part.offset_bytes + part.size_bytes) * computed.of_layers <= page_bytes * computed.layers

    def notice(self, part: int, content_crc32: int | None = None) -> Notice:
        """What the reader is told when this part has been written."""
        grant, parts = self.grant, len(self.parts)
        counts, fingerprint = self.page_counts, grant.layout_fingerprint
        return Notice(grant.grant_id, part, parts, grant.token_count, counts, fingerprint, content_crc32)

    def ranges(self, part: int, page_tables: Sequence[Sequence[int]], landing_row: int) -> tuple[Range, ...]:
        """The copies of one part. page_tables: the sequence's pages here, one table per KV group, indexed by page number.

        landing_row: row of the writer's logits slab. Raises SourceMissing when a table lacks a page.
        """
        one = self.parts[part]
        if isinstance(one, LandingPart):
            row = self.source.landing
            assert self.grant.landing_row is not None, "a plan has a landing part only for a grant with a landing row"
            remote = self.grant.endpoint.landing.address(self.grant.landing_row)
            return (Range(row.address(landing_row), remote, row.unit_bytes),)
        return _merged(self._page_ranges(one, page_tables[one.group]))

    def push(self, push_id: int, part: int, page_tables: Sequence[Sequence[int]], landing_row: int) -> Push:
        """One part, ready for a transport. Raises SourceMissing."""
        ranges = self.ranges(part, page_tables, landing_row)
        content_crc32 = self.source.content(ranges) if self.source.content is not None else None
        return Push(push_id, self.grant.endpoint.agent, ranges, self.notice(part, content_crc32).to_bytes())

    def _page_ranges(self, part: PagePart, table: Sequence[int]) -> list[Range]:
        here, there = self.source.slabs[part.group], self.grant.endpoint.slabs[part.group]
        granted = self.grant.groups[part.group].page_ids
        first = self.grant.first_position // self.source.layout.page_tokens[part.group]
        ranges = []
        for number in part.page_numbers:
            if number >= len(table) or table[number] == NULL_PAGE:
                raise SourceMissing(
                    f"group {part.group} has no page here for page number {number} of grant {self.grant.grant_id}"
                )
            local = here.address(table[number]) + part.offset_bytes
            remote = there.address(granted[number - first]) + part.offset_bytes
            ranges.append(Range(local, remote, part.size_bytes))
        return ranges


def sent_page_counts(grant: Grant) -> tuple[int, ...]:
    """Pages that a complete hand-over of this grant carries, per KV group."""
    return tuple(sum(page != NULL_PAGE for page in group.page_ids) for group in grant.groups)


def part_count(grant: Grant) -> int:
    """Parts of a complete hand-over, a landing row included. Both sides know it from the grant alone."""
    sizes = [slab.unit_bytes for slab in grant.endpoint.slabs[:-1]]
    counts = zip(sent_page_counts(grant), sizes, strict=True)
    parts = sum(-(-pages // _pages_per_part(size)) * len(_pieces(size)) for pages, size in counts)
    return parts + (grant.landing_row is not None)


def plan(grant: Grant, source: SourceMemory) -> HandoverPlan:
    """Cut a grant into parts of at most TRANSFER_BYTES_MAX. Raises LayoutMismatch, or BadGrant when sizes or counts do not fit.

    A grant without pages (the reader has the whole prefix) still has its landing row, so it still commits.
    """
    check_layout(grant, source.layout)
    ours = (*source.slabs, source.landing)
    for index, (here, there) in enumerate(zip(ours, grant.endpoint.slabs, strict=True)):
        if here.unit_bytes != there.unit_bytes:
            raise BadGrant(f"endpoint.slabs[{index}].unit_bytes", f"must be {here.unit_bytes} as here, got {there.unit_bytes}")
    if source.landing.unit_bytes > TRANSFER_BYTES_MAX:
        raise BadGrant(
            "endpoint.slabs",
            f"a landing row of {source.landing.unit_bytes} bytes is above the {TRANSFER_BYTES_MAX} of a transfer",
        )
    cuts = [cut for group in range(len(grant.groups)) for cut in _cut_group(grant, group, source)]
    cuts.sort(key=lambda cut: (cut.ready_tokens, cut.group, cut.page_numbers, cut.offset_bytes))
    parts: list[Part] = [
        PagePart(index, c.group, c.page_numbers, c.offset_bytes, c.size_bytes, c.ready_tokens) for index, c in enumerate(cuts)
    ]
    if grant.landing_row is not None:
        parts.append(LandingPart(len(parts), grant.token_count))
    return HandoverPlan(grant, source, tuple(parts))


def _cut_group(grant: Grant, group: int, source: SourceMemory) -> list[PagePart]:
    page_tokens = source.layout.page_tokens[group]
    page_bytes = source.slabs[group].unit_bytes
    first = grant.first_position // page_tokens
    numbers = [first + i for i, page in enumerate(grant.groups[group].page_ids) if page != NULL_PAGE]
    per_part = _pages_per_part(page_bytes)
    cuts = []
    for start in range(0, len(numbers), per_part):
        pages = tuple(numbers[start : start + per_part])
        ready = min((pages[-1] + 1) * page_tokens, grant.token_count)
        cuts += [PagePart(0, group, pages, offset, size, ready) for offset, size in _pieces(page_bytes)]
    return cuts


def _pieces(page_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a page: some for overlap, more where a page is larger than a transfer may be."""
    count = max(1, min(LAYER_PIECES, page_bytes // PIECE_BYTES_MIN), -(-page_bytes // TRANSFER_BYTES_MAX))
    borders = [page_bytes * piece // count for piece in range(count + 1)]
    return [(start, end - start) for start, end in pairwise(borders)]


def _pages_per_part(page_bytes: int) -> int:
    """As many as fit into a transfer with their piece: a part costs about 0.1 ms beside its bytes. A power of two, so that a part
    ends where a chunk of a prompt does."""
    most = max(1, TRANSFER_BYTES_MAX // max(size for _, size in _pieces(page_bytes)))
    return 1 << (most.bit_length() - 1)


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Join neighbours that are consecutive on both sides: fewer, larger copies."""
    merged: list[Range] = []
    for one in ranges:
        if merged:
            last = merged[-1]
            if (last.local_address + last.size_bytes, last.remote_address + last.size_bytes) == (
                one.local_address,
                one.remote_address,
            ):
                merged[-1] = Range(last.local_address, last.remote_address, last.size_bytes + one.size_bytes)
                continue
        merged.append(one)
    return tuple(merged)

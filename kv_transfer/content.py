"""Checksums of what is handed over, for whoever does not trust the transport: made where it is read, checked where it lies.

Host memory only.
"""

import ctypes
import zlib
from collections.abc import Callable, Sequence

from kv_transfer.offer import Grant, LayoutView
from kv_transfer.plan import Notice, SourceMemory, plan
from kv_transfer.ports import Range


def content_crc32(ranges: Sequence[Range]) -> int:
    """CRC-32 of the bytes at the local addresses, one range after the other."""
    crc32 = 0
    for one in ranges:
        crc32 = zlib.crc32((ctypes.c_char * one.size_bytes).from_address(one.local_address), crc32)
    return crc32


def content_check(
    fingerprint: str, page_tokens: Sequence[int], read: Callable[[Sequence[Range]], int] = content_crc32
) -> Callable[[Grant, Notice], bool]:
    """For the reader of a grant: whether the bytes of a part are here as its writer told. `read` as `content_crc32`."""
    layout = LayoutView(fingerprint, tuple(page_tokens))

    def landed(grant: Grant, notice: Notice) -> bool:
        # The parts follow from the grant alone. Seen from here the place that is written and the one that is read are one.
        here = SourceMemory(layout, grant.endpoint.slabs[:-1], grant.endpoint.landing)
        tables = [
            [*[0] * (grant.first_position // tokens), *group.page_ids]
            for group, tokens in zip(grant.groups, page_tokens, strict=True)
        ]
        return read(plan(grant, here).ranges(notice.part, tables, grant.landing_row or 0)) == notice.content_crc32

    return landed

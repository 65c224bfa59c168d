"""Checksums of handed-over content: what arrived otherwise than it was sent is never decoded."""

import ctypes
import os
from dataclasses import replace

import pytest

from kv_transfer.content import content_check, content_crc32
from kv_transfer.grants import Committed, ReaderBook, ReaderState, Refused
from kv_transfer.offer import Grant, Peer, Slab, endpoint_of
from kv_transfer.plan import HandoverPlan, LandingPart, Notice, SourceMemory, plan
from tests.unit.handover_values import FINGERPRINT, grant, layout

WRITER = Peer("prefill", "p-1", "prefill:1")
PAGE_BYTES, ROW_BYTES, PAGES, ROWS = 96, 40, 32, 8
TABLE = [9, 8, 7, 6, 5, 4, 3]


class Memory:
    """Pages and landing rows of one member, in this process."""

    def __init__(self) -> None:
        self._held = [ctypes.create_string_buffer(os.urandom(size)) for size in (PAGES * PAGE_BYTES, ROWS * ROW_BYTES)]
        addresses = [ctypes.addressof(one) for one in self._held]
        self.slabs = (
            Slab(addresses[0], PAGES * PAGE_BYTES, PAGE_BYTES),
            Slab(addresses[1], ROWS * ROW_BYTES, ROW_BYTES),
        )


@pytest.fixture
def here() -> Memory:
    return Memory()


@pytest.fixture
def there() -> Memory:
    return Memory()


def offered(there: Memory, first_position: int = 0, row: int | None = 5) -> Grant:
    one = grant(first_position, 100, page_bytes=(PAGE_BYTES,))
    return replace(one, landing_row=row, endpoint=endpoint_of("agent", b"metadata", there.slabs))


def source(here: Memory) -> SourceMemory:
    return SourceMemory(layout(), here.slabs[:1], here.slabs[1], content_crc32)


def written(work: HandoverPlan, part: int) -> Notice:
    """One part is copied as a transport does; its notice."""
    push = work.push(part, part, [TABLE], 2)
    for one in push.ranges:
        ctypes.memmove(one.remote_address, one.local_address, one.size_bytes)
    return Notice.from_bytes(push.notice)


@pytest.mark.parametrize(("first_position", "row"), [(0, 5), (48, 5), (0, None)])
def test_what_arrived_as_it_was_sent_commits(here: Memory, there: Memory, first_position: int, row: int | None) -> None:
    book = ReaderBook(landed=content_check(FINGERPRINT, (16,)))
    work = plan(offered(there, first_position, row), source(here))
    book.offer(work.grant, WRITER, 0.0)
    outcomes = [book.arrived("p-1", written(work, part), 1.0) for part in reversed(range(len(work.parts)))]
    assert isinstance(outcomes[-1], Committed)


@pytest.mark.parametrize("which", ["a page", "the row"])
def test_one_changed_byte_is_refused_and_the_grant_taken_back(here: Memory, there: Memory, which: str) -> None:
    book = ReaderBook(landed=content_check(FINGERPRINT, (16,)))
    work = plan(offered(there), source(here))
    book.offer(work.grant, WRITER, 0.0)
    part = next(one.index for one in work.parts if isinstance(one, LandingPart) == (which == "the row"))
    notice = written(work, part)
    last = work.push(part, part, [TABLE], 2).ranges[-1]
    place = (ctypes.c_ubyte * last.size_bytes).from_address(last.remote_address)
    place[last.size_bytes - 1] ^= 1
    outcome = book.arrived("p-1", notice, 1.0)
    assert isinstance(outcome, Refused) and outcome.cause == "content"
    assert book.state(work.grant.grant_id) is ReaderState.REVOKING
    assert book.statistics().refusals == {"content": 1}


def test_a_writer_without_checksums_is_taken_at_its_word(here: Memory, there: Memory) -> None:
    book = ReaderBook(landed=content_check(FINGERPRINT, (16,)))
    work = plan(offered(there), replace(source(here), content=None))
    book.offer(work.grant, WRITER, 0.0)
    notices = [work.notice(part) for part in range(len(work.parts))]
    assert [notice.content_crc32 for notice in notices] == [None] * len(notices)
    assert isinstance([book.arrived("p-1", notice, 1.0) for notice in notices][-1], Committed)


@pytest.mark.parametrize("content_crc32", [None, 0, 0xFFFF_FFFF])
def test_a_notice_with_its_content_survives_the_wire(content_crc32: int | None) -> None:
    notice = Notice("0" * 32, 1, 3, 100, (7, 2), FINGERPRINT, content_crc32)
    assert Notice.from_bytes(notice.to_bytes()) == notice

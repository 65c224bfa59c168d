"""A batch packed for the backends: order of rows, tables, where KV goes, which pages start clean."""

from dataclasses import replace

import pytest

from engine.batch import Batch, Rows
from engine.step import StepLimits, build_step, build_steps

LIMITS = StepLimits(vocabulary_size=100, context_tokens=64, page_tokens=4, total_pages=50)

DECODE_LONG = Rows("long", (7,), 9, ((3, 9, 4),), True)
DECODE_SHORT = Rows("short", (8,), 0, ((5, 6),), True)
CHUNK = Rows("chunk", (1, 2, 3), 3, ((20, 10, 30),), True)
QUIET = Rows("quiet", (4, 5, 6, 7), 0, ((40,),), False)


def test_decode_rows_come_first_by_length_then_chunks() -> None:
    step = build_step(Batch((CHUNK, DECODE_LONG, QUIET, DECODE_SHORT)), LIMITS)
    assert step.token_ids.tolist() == [8, 7, 1, 2, 3, 4, 5, 6, 7]
    assert step.positions.tolist() == [0, 9, 3, 4, 5, 0, 1, 2, 3]
    assert step.decode_lengths.tolist() == [1, 10]
    assert step.decode_pages.tolist() == [[5, 0, 0], [3, 9, 4]]
    assert step.write_pages.tolist() == [5, 4, 20, 10, 10, 40, 40, 40, 40]
    assert step.write_offsets.tolist() == [0, 1, 3, 0, 1, 0, 1, 2, 3]
    assert [(chunk.start, chunk.end, chunk.first_position, chunk.pages.tolist()) for chunk in step.chunks] == [
        (2, 5, 3, [20, 10]),
        (5, 9, 0, [40]),
    ]


def test_logits_come_back_in_the_order_of_the_batch() -> None:
    assert build_step(Batch((CHUNK, DECODE_LONG, QUIET, DECODE_SHORT)), LIMITS).logit_rows.tolist() == [4, 1, 0]
    assert build_step(Batch((QUIET,)), LIMITS).logit_rows.tolist() == []


def test_pages_begun_but_not_filled_start_clean() -> None:
    assert build_step(Batch((CHUNK, DECODE_LONG, QUIET, DECODE_SHORT)), LIMITS).fresh_pages.tolist() == [5, 10]
    assert build_step(Batch((DECODE_LONG,)), LIMITS).fresh_pages.tolist() == []
    whole = Rows("whole", tuple(range(8)), 0, ((1, 2),), True)
    assert build_step(Batch((whole,)), LIMITS).fresh_pages.tolist() == []


# A second group with the last four tokens in view, whose tables are null before that.
WINDOWED = (LIMITS, replace(LIMITS, window=4))


def both(rows: Rows, table: tuple[int, ...]) -> Rows:
    return replace(rows, pages=(rows.pages[0], table))


def test_a_group_behind_a_window_sees_only_the_pages_of_its_window() -> None:
    chunk = both(Rows("chunk", (1, 2, 3), 9, ((20, 10, 30),), True), (0, 11, 31))
    batch = Batch((chunk, both(DECODE_LONG, (0, 8, 2)), both(DECODE_SHORT, (7,))))
    whole, windowed = build_steps(batch, WINDOWED)
    assert whole.token_ids is windowed.token_ids and whole.logit_rows is windowed.logit_rows
    assert whole.decode_pages.tolist() == [[5, 0, 0], [3, 9, 4]]
    assert (windowed.decode_lengths.tolist(), windowed.decode_pages.tolist()) == ([1, 6], [[7, 0], [8, 2]])
    assert windowed.positions.tolist() == [0, 9, 9, 10, 11]
    assert windowed.write_pages.tolist() == [7, 2, 31, 31, 31]
    assert windowed.write_offsets.tolist() == [0, 1, 1, 2, 3]
    assert [(each.first_position, each.cache_tokens, each.pages.tolist()) for each in windowed.chunks] == [(5, 8, [11, 31])]


def test_a_table_without_a_page_that_the_window_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="page id is outside"):
        build_steps(Batch((both(DECODE_LONG, (0, 0, 2)),)), WINDOWED)
    with pytest.raises(ValueError, match="1 page tables; this model has 2 KV groups"):
        build_steps(Batch((DECODE_LONG,)), WINDOWED)


def test_drafts_have_logits_for_each_row_as_a_chunk_and_singly() -> None:
    drafting = Rows("drafting", (9, 10, 11), 7, ((12, 13, 14),), True, draft_tokens=2)
    batch = Batch((CHUNK, drafting, QUIET, DECODE_LONG))
    step = build_step(batch, LIMITS)
    assert step.token_ids.tolist() == [7, 1, 2, 3, 9, 10, 11, 4, 5, 6, 7]
    assert step.logit_rows.tolist() == [3, 4, 5, 6, 0]
    apart = build_step(batch.singly(), LIMITS)
    assert apart.token_ids.tolist() == [9, 10, 11, 7, 1, 2, 3, 4, 5, 6, 7]
    assert apart.decode_lengths.tolist() == [8, 9, 10, 10]
    assert apart.logit_rows.tolist() == [6, 0, 1, 2, 3]
    assert apart.write_pages[:4].tolist() == [13, 14, 14, 4]
    assert step.fresh_pages.tolist() == apart.fresh_pages.tolist() == [10, 14]
    assert Batch((CHUNK,)).singly().rows == (CHUNK,)


@pytest.mark.parametrize(("ids", "wanted", "drafts"), [((1, 2, 3), True, 1), ((1, 2), False, 1), ((1,), True, 1)])
def test_drafts_that_do_not_follow_one_token_are_refused(ids: tuple[int, ...], wanted: bool, drafts: int) -> None:
    with pytest.raises(ValueError, match="draft_tokens of sequence odd is 1"):
        Rows("odd", ids, 0, ((1,),), wanted, draft_tokens=drafts)

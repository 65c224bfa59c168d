"""A batch packed for the backends: order of rows, tables, where KV goes, which pages start clean."""

from engine.batch import Batch, Rows
from engine.step import StepLimits, build_step

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

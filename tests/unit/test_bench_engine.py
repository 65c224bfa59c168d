"""Bursts in turns, ratios of them, the rows of what a step is measured against."""

import pytest

from bench import engine
from bench.engine import NATIVE, WEIGHTS, WEIGHTS_AND_KV, Measured, shapes_of, target_rows
from bench.engine_steps import Shape, kv_read, step_of
from bench.targets import Bound
from bench.turns import BURST_CALLS, Bursts, doubts, in_turns, ratio
from tests.scripted import ScriptedRunner


def bursts(*medians_s: float, disturbed: tuple[int, ...] = ()) -> Bursts:
    made = Bursts()
    for index, median_s in enumerate(medians_s):
        made.add([median_s, median_s / 2, median_s * 3], index in disturbed)
    return made


def test_a_ratio_compares_the_bursts_of_a_round_with_one_another() -> None:
    # The machine was three times as slow in the last round: for both.
    step, read = bursts(3.0, 3.3, 9.0), bursts(2.0, 2.0, 6.0)
    assert ratio(step, read) == pytest.approx(1.5)
    assert (step.least, step.median) == (1.5, 3.3)


def test_disturbed_rounds_count_only_when_there_are_no_others() -> None:
    step, read = bursts(8.0, 3.0, 4.0, disturbed=(0,)), bursts(2.0, 2.0, 2.0, disturbed=(2,))
    assert ratio(step, read) == 1.5
    assert doubts(step, read) == "2 of 6"
    assert ratio(bursts(8.0, disturbed=(0,)), bursts(2.0)) == 4.0


def test_calls_are_measured_in_turns_and_warmed_up_before() -> None:
    order: list[str] = []
    kept = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, burst_s=0.0)
    assert order == ["a", "b", *(["a"] * BURST_CALLS + ["b"] * BURST_CALLS) * 2]
    assert all(len(one.median_s) == 2 for one in kept.values())


def test_a_decode_step_is_the_last_token_of_each_sequence_on_pages_of_its_own() -> None:
    runner = ScriptedRunner(300, page_tokens=4, total_pages=64, otherwise=lambda history: 1)
    runner.slab_tensors[:] = 5  # what the sequences' earlier tokens left
    step_of(runner, Shape(3, 18))()
    step_of(runner, Shape(1, 9, decode=False))()
    decode, prompt = (batch.rows for batch in runner.batches)
    assert [(len(rows.token_ids), rows.first_position, len(rows.pages[0])) for rows in decode] == [(1, 17, 5)] * 3
    assert sorted(page for rows in decode for page in rows.pages[0]) == list(range(1, 16))
    assert [(len(rows.token_ids), rows.first_position, len(rows.pages[0])) for rows in prompt] == [(9, 0, 3)]
    assert kv_read(runner, Shape(3, 18)) == [(runner.slabs[0].address_of(1), 15 * runner.slabs[0].unit_bytes)]


def test_the_targets_of_a_step() -> None:
    one = Measured(Shape(1, 128), {WEIGHTS: bursts(0.020), WEIGHTS_AND_KV: bursts(0.021), NATIVE: bursts(0.026)})
    many = Measured(
        Shape(32, 512), {WEIGHTS: bursts(0.020), WEIGHTS_AND_KV: bursts(0.050), NATIVE: bursts(0.120, disturbed=(0,))}
    )
    rows = target_rows([one, many])
    assert [row[3] for row in rows] == ["1.30", "-", "2.40"]
    assert [row[6] for row in rows] == ["must", "not measured", "**missed**"]
    assert rows[2][7] == "1 of 2"
    assert one.rows()[2] == ["decode, 1 x 128", NATIVE, "13.0", "26.0", "1.30", "1.24", "0 of 1"]
    assert one.rows()[0][4:6] == ["-", "-"]


def test_a_bound_has_a_word_for_each_ratio() -> None:
    most, least = Bound(1.4, 1.2), Bound(0.7, 0.9)
    assert [most.verdict(ratio, more_is_better=False) for ratio in (1.1, 1.2, 1.4, 1.5)] == ["aim", "aim", "must", "**missed**"]
    assert [least.verdict(ratio, more_is_better=True) for ratio in (0.95, 0.8, 0.6)] == ["aim", "must", "**missed**"]
    assert Bound(None, None).verdict(1.0, more_is_better=True) == "reported"


def test_shapes_are_read_from_words() -> None:
    assert shapes_of("1x128,32x512", "512") == [Shape(1, 128), Shape(32, 512), Shape(1, 512, decode=False)]
    assert shapes_of("", "") == []
    with pytest.raises(ValueError):
        shapes_of("8", "")
    assert {target.shape for target in engine.TARGETS} <= set(shapes_of("1x128,1x512,8x512,16x512,32x512", ""))

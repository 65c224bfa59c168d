"""The runner's contract: mixed steps, page sizes, what it refuses, what a failure looks like."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import Batch, LayerMarks, Rows
from engine.core_share import NO_LOAN, CoreShare, Loan
from engine.llama import Decoder
from engine.runner import ModelError, ModelRunner, finite_rows
from engine.slab import allocate_slab
from engine.step import Step, StepLimits
from engine.weights import LoadProgress
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.tiny_models import CONTEXT, VOCABULARY, Driver, prompt
from tests.reference import all_logits

Tiny = tuple[PreTrainedModel, ModelRef]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    model = tiny_models.build("llama")
    return model, tiny_models.save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(tiny: Tiny) -> ModelRunner:
    return tiny_models.load(tiny[1], page_tokens=4, total_pages=400)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_decode_rows_and_chunks_mix_in_one_step(tiny: Tiny, runner: ModelRunner) -> None:
    """Two decode rows of unlike lengths, a first chunk, a middle chunk that wants no logits, and a last chunk, in no order."""
    texts = {name: prompt(25, seed) for seed, name in enumerate(("long", "short", "first", "middle", "last"))}
    expected = {name: all_logits(tiny[0], ids) for name, ids in texts.items()}
    driver = Driver(runner)
    driver.feed("long", texts["long"][:21])
    driver.feed("short", texts["short"][:2])
    driver.feed("middle", texts["middle"][:3])
    driver.feed("last", texts["last"][:9])
    logits = driver.step(
        driver.rows("first", texts["first"][:7]),
        driver.rows("long", texts["long"][21:22]),
        driver.rows("middle", texts["middle"][3:9], wants_logits=False),
        driver.rows("last", texts["last"][9:25]),
        driver.rows("short", texts["short"][2:3]),
    )
    assert_close(logits, torch.stack([expected["first"][6], expected["long"][21], expected["last"][24], expected["short"][2]]))
    assert_close(driver.feed("middle", texts["middle"][9:10]), expected["middle"][9])


def test_a_large_decode_batch_of_every_length(tiny: Tiny, runner: ModelRunner) -> None:
    """Lengths from 1 to 120 fall into several buckets; each row must still see its own keys only."""
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 30, 31, 32, 33, 64, 90, 119, 120]
    texts = {f"{length}": prompt(length + 1, seed=3) for length in lengths}
    driver = Driver(runner)
    for name, ids in texts.items():
        driver.feed(name, ids[:-1])
    logits = driver.step(*(driver.rows(name, ids[-1:]) for name, ids in texts.items()))
    assert_close(logits, torch.stack([all_logits(tiny[0], ids)[-1] for ids in texts.values()]))


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_any_page_size(tiny: Tiny, page_tokens: int) -> None:
    ids = prompt(70)
    expected = all_logits(tiny[0], ids)
    driver = Driver(tiny_models.load(tiny[1], page_tokens=page_tokens, total_pages=80))
    driver.feed("a", ids[:33])
    driver.feed("a", ids[33:67])
    for position in range(67, 70):
        assert_close(driver.feed("a", [ids[position]]), expected[position])


def test_a_prompt_of_the_whole_context_and_no_more(tiny: Tiny, runner: ModelRunner) -> None:
    ids = prompt(CONTEXT)
    driver = Driver(runner)
    assert_close(driver.feed("a", ids), all_logits(tiny[0], ids)[-1])
    with pytest.raises(ValueError, match=f"context_tokens is {CONTEXT}"):
        driver.feed("a", [1])


def test_rows_without_logits_write_the_same_pages(tiny: Tiny) -> None:
    runner = tiny_models.load(tiny[1], page_tokens=4, total_pages=20)
    driver = Driver(runner)
    ids = prompt(14)
    wanted = driver.feed("a", ids)
    quiet = driver.step(driver.rows("b", ids, wants_logits=False))
    assert quiet.shape == (0, VOCABULARY)
    assert_close(driver.feed("b", [5]), driver.feed("a", [5]))
    assert wanted.shape == (VOCABULARY,)


def test_a_step_tells_when_the_kv_of_some_layers_is_written(tiny: Tiny, runner: ModelRunner) -> None:
    """What lies in the pages at that moment is what lies there in the end; the layers behind it are not written yet."""
    layers = runner.layout.groups[0].layers
    pages = range(1, 8)
    ours = runner.slab_data[0].view(runner.slabs[0].units, layers, -1)[1:8]
    runner.slab_data[0].zero_()
    seen: list[torch.Tensor] = []
    text = prompt(25, 3)
    batch = Batch((Rows("told", text, 0, (pages,), True),))
    with_marks = runner.run(batch, LayerMarks(tuple(range(1, layers + 1)), lambda _: seen.append(ours.clone())))
    assert layers >= 2 and len(seen) == layers
    for done, then in enumerate(seen, 1):
        assert torch.equal(then[:, :done], ours[:, :done]) and ours[:, :done].any()
        assert not then[:, done:].any()
    assert torch.equal(with_marks, runner.run(batch))


def test_what_an_earlier_owner_left_in_a_page_does_not_show(tiny: Tiny, runner: ModelRunner) -> None:
    """A NaN behind the end of a sequence would pass through any mask; a page is cleared when it is begun."""
    ids = prompt(11)
    slab = runner.slabs[0]
    floats = (ctypes.c_float * (slab.size_bytes // 4)).from_address(slab.address)
    page_floats = slab.unit_bytes // 4
    pool = torch.frombuffer(floats, dtype=torch.float32)
    pool[page_floats:].fill_(float("nan"))
    driver = Driver(runner)
    driver.feed("a", ids[:6])
    expected = all_logits(tiny[0], ids)
    for position in range(6, 10):
        assert_close(driver.feed("a", [ids[position]]), expected[position])
    pool[page_floats:].fill_(0)
    assert not pool[:page_floats].any(), "the null page was written"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": (VOCABULARY,)}, f"0..{VOCABULARY - 1}"),
        ({"token_ids": (-1,)}, "token id"),
        ({"pages": ((0,),)}, "null page"),
        ({"pages": ((400,),)}, "1..399"),
        ({"pages": ((),)}, "page table of sequence a"),
        ({"first_position": 4}, "5 tokens need 2"),
        ({"pages": ((1,), (1,))}, "1 KV group"),
    ],
)
def test_a_broken_batch_is_refused_before_anything_is_written(runner: ModelRunner, change: dict[str, object], named: str) -> None:
    rows = dataclasses.replace(Rows("a", (5,), 0, ((1,),), True), **change)
    with pytest.raises(ValueError, match=named):
        runner.run(Batch((rows,)))


class _FailingDecoder(Decoder):
    def __init__(self) -> None:
        pass

    @property
    def uses_loans(self) -> bool:
        return False

    def forward(self, steps: Sequence[Step], marks: LayerMarks | None = None, loan: Loan = NO_LOAN) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def part_seconds(self) -> dict[str, float]:
        return {}


def test_a_failing_step_is_a_model_error(runner: ModelRunner) -> None:
    failing = ModelRunner(_FailingDecoder(), runner.layout, [allocate_slab(4, 64)], [StepLimits(8, 8, 4, 4)], "double")
    with pytest.raises(ModelError, match="1 sequences failed: out of memory"):
        failing.run(Batch((Rows("a", (5,), 0, ((1,),), True),)))
    assert (failing.statistics().steps, failing.statistics().failed_steps) == (0, 1)


def test_what_a_runner_says_about_itself(tiny: Tiny) -> None:
    seen: list[LoadProgress] = []
    runner = tiny_models.load(tiny[1], page_tokens=8, total_pages=10, progress=seen.append)
    group = runner.layout.groups[0]
    assert (runner.vocabulary_size, runner.context_tokens) == (VOCABULARY, CONTEXT)
    assert (group.layers, group.kv_heads, group.head_dim, group.page_tokens, group.dtype) == (3, 2, 8, 8, "float32")
    assert runner.slabs[0].unit_bytes == group.page_bytes
    assert runner.slabs[0].units == 10
    assert [each.done for each in seen] == [0, 1, 2, 3, 4, 5]
    assert {each.total for each in seen} == {5}
    Driver(runner).feed("a", [1, 2, 3])
    assert (runner.statistics().steps, runner.statistics().rows) == (1, 3)
    assert runner.statistics().model_part_seconds == {}, "a step out of single operations is not counted by part"


def test_each_group_has_its_own_slab_and_a_window_says_how_many_pages(tmp_path: Path) -> None:
    ref = tiny_models.save(tiny_models.build("gemma3"), tmp_path)
    runner = tiny_models.load(ref, page_tokens=4, total_pages=30, window_pages=lambda group: (group.window or 0) + 5)
    full, sliding = runner.layout.groups
    assert (full.layers, full.window, sliding.layers, sliding.window) == (1, None, 3, 12)
    assert [slab.units for slab in runner.slabs] == [30, 17]
    assert [slab.unit_bytes for slab in runner.slabs] == [full.page_bytes, sliding.page_bytes]
    with pytest.raises(ValueError, match="1 page tables; this model has 2 KV groups"):
        runner.run(Batch((Rows("a", (5,), 0, ((1,),), True),)))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"dtype": "float16"}, "dtype"), ({"total_pages": 1}, "total_pages"), ({"page_tokens": 0}, "page_tokens")],
)
def test_settings_outside_their_limits_are_named(tiny: Tiny, change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tiny_models.load(tiny[1], **change)


def test_threads_have_limits(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        ModelRunner.load(tiny[1], dtype="float32", total_pages=4, threads=0)


def test_bfloat16_stays_near_float32(tiny: Tiny) -> None:
    ids = prompt(40)
    ours = Driver(tiny_models.load(tiny[1], dtype="bfloat16")).feed("a", ids)
    theirs = all_logits(tiny[0], ids)[-1]
    assert ours.dtype == torch.float32
    assert float((ours - theirs).abs().max()) < 0.05 * float(theirs.abs().max())


def test_finite_rows() -> None:
    rows = torch.tensor(
        [[1.0, 2.0], [float("nan"), 1.0], [float("-inf"), float("-inf")], [float("-inf"), 0.0], [float("inf"), 0.0]]
    )
    assert finite_rows(rows) == [True, False, False, True, False]
    assert finite_rows(torch.empty(0, 5)) == []


def test_loading_a_path_without_weights_says_so(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "config.json").write_text((tiny[1].path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tiny_models.load(dataclasses.replace(tiny[1], path=tmp_path))


def test_operations_of_torch_borrow_no_cores_that_they_would_not_use(tiny: Tiny, tmp_path: Path) -> None:
    batch = Batch((Rows("a", (5,), 0, ((1,),), True),))
    with contextlib.closing(CoreShare(tmp_path, "idle", 1, 4)), contextlib.closing(CoreShare(tmp_path, "torch", 1, 4)) as mine:
        runner = tiny_models.load(tiny[1], page_tokens=4, backend="torch", cores=mine)
        runner.run(batch)
        with contextlib.closing(CoreShare(tmp_path, "other", 1, 4)) as other, other.borrowed() as loan:
            assert loan.threads == 1, "of the idle one; the other one has work"
            assert runner.statistics().lent_steps == 0

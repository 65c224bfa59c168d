"""Whole steps of the native backend: right, equal to their parts, and the same however rows are put together."""

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch

from engine.batch import Batch, LayerMarks, Rows
from engine.core_share import Loan, Recall
from engine.native.instruction_sets import InstructionSet
from engine.native.library import OPERATIONS
from engine.runner import ModelError, ModelRunner
from engine.step import StepLimits, build_step
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.native_sets import every_fast_set, every_set, needs_compiler, only
from tests.engine.tiny_models import VOCABULARY, Driver, prompt
from tests.reference import all_logits, default_model

pytestmark = [needs_compiler, pytest.mark.slow]

# What kernels must not mind: sizes that are no multiple of their blocks, biases, norms on heads, one key head, long heads.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"head_dim": 32, "hidden_size": 90, "intermediate_size": 70}),
    "biases": ("llama-biases", {"head_dim": 64, "hidden_size": 66, "intermediate_size": 100}),
    "one-kv-head": ("llama-one-kv-head", {"head_dim": 128, "num_attention_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}),
}
MARK_S = 0.02
# Of a step's time; the rest is the way into the call and out of it, about a fiftieth.
COUNTED_SHARE = 0.8
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 90, 100, 128)


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, ModelRef]:
    variant, changes = VARIANTS[request.param]
    model = tiny_models.build(variant, **changes).to(torch.bfloat16)
    return model, tiny_models.save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def tiny_ref(tiny: tuple[torch.nn.Module, ModelRef]) -> ModelRef:
    return tiny[1]


def load(ref: ModelRef, instructions: InstructionSet, threads: int = 1, total_pages: int = 400) -> ModelRunner:
    return tiny_models.load(ref, total_pages=total_pages, dtype="bfloat16", registry=only(instructions, threads))


def default(instructions: InstructionSet, threads: int = 1) -> ModelRunner:
    return load(default_model(), instructions, threads)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def pages_of(driver: Driver, name: str) -> torch.Tensor:
    """The keys and values of a sequence in the order of its tokens, whatever pages they lie in."""
    group = driver.runner.layout.groups[0]
    pool = driver.runner.slab_data[0].view(torch.int16)
    pool = pool.view(-1, group.layers, group.page_tokens, 2 * group.kv_heads * group.head_dim)
    rows = pool[driver.tables[name][0]].transpose(1, 2).flatten(0, 1)
    return rows[: driver.done[name]].clone()


def feed_in_parts(driver: Driver, name: str, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits after the last part."""
    logits = torch.empty(0)
    for size in sizes:
        first = driver.done.get(name, 0)
        logits = driver.feed(name, ids[first : first + size])
    assert driver.done[name] == len(ids)
    return logits


@every_set
def test_logits_are_those_of_the_reference(tiny: tuple[torch.nn.Module, ModelRef], instructions: InstructionSet) -> None:
    model, ref = tiny
    driver = Driver(load(ref, instructions))
    ids = prompt(70)
    expected = all_logits(model.to(torch.float32), ids)
    driver.feed("a", ids[:40])
    for position in (40, 41):
        logits = driver.feed("a", ids[position : position + 1])
        torch.testing.assert_close(logits, expected[position], rtol=0, atol=3e-2 * float(expected.abs().max()))


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_whole_step_is_its_parts_bit_for_bit(tiny_ref: ModelRef, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(load(tiny_ref, instructions, threads))
    driver.feed("decoding", prompt(37))
    driver.feed("going on", prompt(23, 1))
    compare_with_parts(
        driver,
        driver.rows("decoding", prompt(1, 2)),
        driver.rows("new", prompt(50, 3)),
        driver.rows("silent", prompt(33, 4), wants_logits=False),
        driver.rows("going on", prompt(20, 5)),
        driver.rows("short", prompt(1, 6)),
    )
    compare_with_parts(driver, driver.rows("only silent", prompt(33, 7), wants_logits=False))


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_the_parts_of_steps_take_no_longer_than_the_steps(tiny_ref: ModelRef, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(load(tiny_ref, instructions, threads))
    runner = driver.runner
    assert runner.statistics().model_part_seconds == dict.fromkeys(OPERATIONS, 0.0)
    began = time.monotonic()
    driver.feed("told", prompt(30))
    spent_s: list[float] = []

    def told(layers: int) -> None:
        at = time.monotonic()
        while time.monotonic() < at + MARK_S:  # most of the step: what is counted twice shows
            pass
        spent_s.append(time.monotonic() - at)

    runner.run(Batch((driver.rows("told", prompt(30, 1)),)), LayerMarks((1,), told))
    took_s = time.monotonic() - began
    parts = runner.statistics().model_part_seconds
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(spent_s) <= parts["tell"] and sum(parts.values()) <= took_s
    driver.step(driver.rows("silent", prompt(33, 2), wants_logits=False))
    after = runner.statistics().model_part_seconds
    assert after["head"] == parts["head"] and all(after[part] > parts[part] for part in ("embed", "norm", "qkv", "attend"))


@every_fast_set
def test_the_parts_of_a_step_are_nearly_all_of_it(instructions: InstructionSet) -> None:
    driver = Driver(default(instructions))
    driver.feed("a", prompt(100))
    shares = []
    for _ in range(10):  # another process may come between once
        rows, before = driver.rows("a", prompt(1)), sum(driver.runner.statistics().model_part_seconds.values())
        began = time.monotonic()
        driver.step(rows)
        took_s = time.monotonic() - began
        shares.append((sum(driver.runner.statistics().model_part_seconds.values()) - before) / took_s)
    assert COUNTED_SHARE <= max(shares) <= 1


def compare_with_parts(driver: Driver, *rows: Rows) -> None:
    runner = driver.runner
    group = runner.layout.groups[0]
    step = build_step(
        Batch(rows), StepLimits(runner.vocabulary_size, runner.context_tokens, group.page_tokens, runner.slabs[0].units)
    )
    pool = runner.slab_data[0]
    before = pool.clone()
    with torch.inference_mode():
        whole, after = runner.decoder.forward((step,)).clone(), pool.clone()
        pool.copy_(before)
        parts = runner.decoder.compose((step,))
    assert same(whole, parts)
    assert torch.equal(after, pool)


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_may_be_cut_anywhere(tiny_ref: ModelRef, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(load(tiny_ref, instructions, threads))
    ids = prompt(133)
    whole = driver.feed("whole", ids)
    pages = pages_of(driver, "whole")
    cuts = {"halves": (64, 64, 5), "odd": (37, 90, 1, 5), "singles": (100, *[1] * 33), "pages": (16,) * 8 + (5,)}
    for name, sizes in cuts.items():
        assert same(feed_in_parts(driver, name, ids, sizes), whole), name
        assert torch.equal(pages_of(driver, name), pages), name


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_reads_the_same_alone_and_among_others(tiny_ref: ModelRef, instructions: InstructionSet, threads: int) -> None:
    one, many = Driver(load(tiny_ref, instructions)), Driver(load(tiny_ref, instructions, threads))
    texts = {f"{length}": prompt(length + 1, seed=3) for length in LENGTHS}
    alone = {}
    for name, ids in texts.items():
        one.feed(name, ids[:-1])
        alone[name] = one.feed(name, ids[-1:])
    many.step(*(many.rows(name, ids[:-1]) for name, ids in texts.items()))
    for name, logits in zip(texts, many.step(*(many.rows(name, ids[-1:]) for name, ids in texts.items())), strict=True):
        assert same(logits, alone[name]), name
        assert torch.equal(pages_of(many, name), pages_of(one, name)), name
    extra = {f"again {name}": ids for name, ids in texts.items()}
    rows = [many.rows(name, ids if len(ids) % 2 else ids[:-1]) for name, ids in extra.items()]
    mixed = dict(zip(extra, many.step(*rows), strict=True))
    for name, ids in extra.items():
        logits = mixed[name] if len(ids) % 2 else many.feed(name, ids[-1:])
        assert same(logits, alone[name.removeprefix("again ")]), name


@cache
def _text(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 40_000, (length,), generator=generator).tolist())


@every_fast_set
@pytest.mark.parametrize("threads", [1, 2])
def test_the_default_model_reads_the_same_however_it_is_fed(instructions: InstructionSet, threads: int) -> None:
    driver = Driver(default(instructions, threads))
    ids = _text(300, 1)
    whole = driver.feed("whole", ids)
    pages = pages_of(driver, "whole")
    for name, sizes in {"64": (64,) * 4 + (44,), "odd": (37, 100, 1, 162), "last": (299, 1)}.items():
        assert same(feed_in_parts(driver, name, ids, sizes), whole), name
        assert torch.equal(pages_of(driver, name), pages), name
    packed = driver.step(
        driver.rows("x", _text(70, 2)), driver.rows("packed", ids), driver.rows("y", _text(1, 3)), driver.rows("z", _text(33, 4))
    )
    assert same(packed[1], whole)
    assert torch.equal(pages_of(driver, "packed"), pages)
    compare_with_parts(driver, driver.rows("x", _text(1, 5)), driver.rows("y", _text(40, 6)), driver.rows("new", _text(129, 7)))


class Lent:
    """Threads that come and go from step to step."""

    def __init__(self) -> None:
        self.turns = itertools.cycle((0, 1, 2, 1))
        self.spare: list[int] = []
        self.wanted = ctypes.c_uint32()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Loan]:
        self.spare.append(next(self.turns))
        yield Loan(self.spare[-1], (Recall(ctypes.addressof(self.wanted), self.wanted.value),))

    def working(self) -> None:
        raise AssertionError("native steps use what is lent")

    def rest(self) -> None:
        pass


@every_set
def test_threads_that_come_and_go_change_nothing(tiny_ref: ModelRef, instructions: InstructionSet) -> None:
    lent = Lent()
    settings = {"total_pages": 400, "dtype": "bfloat16", "registry": only(instructions)}
    alone, helped = (Driver(tiny_models.load(tiny_ref, **settings, cores=cores)) for cores in (None, lent))
    for length in (90, 33, 1, 1, 1, 17, 1, 1):
        said = [
            driver.step(
                driver.rows("a", prompt(length)), driver.rows("b", prompt(1, length)), driver.rows(f"{length}", prompt(20))
            )
            for driver in (alone, helped)
        ]
        assert all(same(left, right) for left, right in zip(*said, strict=True)), lent.spare
    assert torch.equal(pages_of(alone, "a"), pages_of(helped, "a"))
    assert set(lent.spare) == {0, 1, 2} and helped.runner.statistics().lent_steps == 6
    assert helped.runner.statistics().model_part_seconds["qkv"] > 0
    assert helped.runner.statistics().recalled_steps == 0


@every_set
def test_threads_that_are_recalled_while_a_step_runs_change_nothing(tiny_ref: ModelRef, instructions: InstructionSet) -> None:
    """Behind each layer once; the next step has them again."""
    lent = Lent()
    lent.turns = itertools.cycle((1, 2))
    settings = {"total_pages": 400, "dtype": "bfloat16", "registry": only(instructions)}
    alone, helped = (tiny_models.load(tiny_ref, **settings, cores=cores) for cores in (None, lent))
    told: list[int] = []

    def recall(layers: int) -> None:
        told.append(layers)
        lent.wanted.value += 1

    def step(runner: ModelRunner, marks: LayerMarks | None) -> torch.Tensor:
        long = Rows("a", tuple(prompt(40)), 0, (tuple(range(1, 12)),), wants_logits=True)
        short = Rows("b", tuple(prompt(9)), 0, ((12, 13, 14),), wants_logits=True)
        return runner.run(Batch((long, short)), marks)

    expected = step(alone, None)
    layers = alone.layout.groups[0].layers
    for layer in [*range(1, layers + 1), 1]:
        assert same(step(helped, LayerMarks((layer,), recall)), expected)
        assert same(step(helped, None), expected)
    assert told == [*range(1, layers + 1), 1]
    assert helped.statistics().recalled_steps == layers + 1


class Comes:
    """Threads that nobody lends when a step begins, and some later: while `turns` is even. Implements Cores and Later."""

    most = 2

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.turns, self.wanted = ctypes.c_uint32(1), ctypes.c_uint32()
        self.watched = (ctypes.addressof(self.turns),)
        self.loans: list[Loan] = []

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Loan]:
        yield Loan(later=self)

    def take(self) -> Loan:
        self.loans.append(Loan(self.threads, (Recall(ctypes.addressof(self.wanted), self.wanted.value),)))
        return self.loans[-1]

    def working(self) -> None:
        raise AssertionError("native steps use what is lent")

    def rest(self) -> None:
        pass


@every_set
@pytest.mark.parametrize(("own_threads", "threads"), [(1, 0), (1, 1), (1, 2), (2, 1)])
def test_threads_that_come_while_a_step_runs_change_nothing(
    tiny_ref: ModelRef, instructions: InstructionSet, own_threads: int, threads: int
) -> None:
    """Behind each layer, and they go behind each of the later ones and come once more."""
    comes = Comes(threads)
    settings = {"total_pages": 400, "dtype": "bfloat16", "registry": only(instructions), "threads": own_threads}
    alone, helped = (ModelRunner.load(tiny_ref, **settings, cores=cores) for cores in (None, comes))
    layers = alone.layout.groups[0].layers

    def step(runner: ModelRunner, marks: LayerMarks | None) -> torch.Tensor:
        long = Rows("a", tuple(prompt(150)), 0, (tuple(range(1, 40)),), wants_logits=True)
        short = Rows("b", tuple(prompt(9)), 0, ((40, 41, 42),), wants_logits=True)
        return runner.run(Batch((long, short)), marks)

    def meanwhile(entered: int, left: int) -> Callable[[int], None]:
        def told(layer: int) -> None:
            comes.turns.value = 0 if layer in (entered, left) else 1
            comes.wanted.value += layer == left

        return told

    expected = step(alone, None)
    for entered in range(1, layers + 1):
        for left in range(entered + 1, layers + 1):
            comes.loans.clear()
            comes.turns.value = 1
            asked = {entered, left} - {layers}
            marks = LayerMarks(tuple(range(1, layers + 1)), meanwhile(entered, left))
            assert same(step(helped, marks), expected), (entered, left)
            # Threads of the last step, or who has just left, may be on their way out still: nobody waits for those.
            assert len(comes.loans) <= len(asked)
    comes.turns.value = 0
    came = 0
    while not came:
        comes.loans.clear()
        assert same(step(helped, None), expected), "from the first layer on"
        came = len(comes.loans)
    assert came == (1 if threads else layers)
    assert torch.equal(alone.slab_data[0], helped.slab_data[0])
    assert (helped.statistics().lent_steps > 0) is (threads > 0)


@every_fast_set
def test_batches_of_the_default_model_say_what_each_row_says_alone(instructions: InstructionSet) -> None:
    driver = Driver(default(instructions))
    names = [f"{number}" for number in range(33)]
    for part in (names[:11], names[11:22], names[22:]):
        driver.step(*(driver.rows(name, _text(3 + 2 * int(name), int(name)), wants_logits=False) for name in part))
    tables = {name: list(driver.tables[name][0]) for name in names}
    done = dict(driver.done)
    together = driver.step(*(driver.rows(name, [int(name) + 100]) for name in names))
    for count in (1, 2, 8, 32):
        driver.tables, driver.done = {name: (list(table),) for name, table in tables.items()}, dict(done)
        for number, logits in enumerate(driver.step(*(driver.rows(name, [int(name) + 100]) for name in names[:count]))):
            assert same(logits, together[number])


@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_tells_when_layers_are_written(tiny_ref: ModelRef, instructions: InstructionSet, threads: int) -> None:
    runner = load(tiny_ref, instructions, threads)
    layers = runner.layout.groups[0].layers
    ours = runner.slab_data[0].view(runner.slabs[0].units, layers, -1)[1:4]
    batch = Batch((Rows("told", tuple(prompt(40)), 0, (range(1, 4),), True),))
    plain = runner.run(batch)
    runner.slab_data[0].zero_()
    seen: list[tuple[int, torch.Tensor]] = []
    told = runner.run(batch, LayerMarks((1, layers), lambda count: seen.append((count, ours.clone()))))
    assert [count for count, _ in seen] == [1, layers]
    assert torch.equal(seen[0][1][:, :1], ours[:, :1]) and torch.equal(seen[1][1], ours)
    assert not seen[0][1][:, 1:].any()
    assert same(told, plain)

    def failing(_: int) -> None:
        raise ModelError("the hand-over is gone")

    with pytest.raises(ModelError, match="the hand-over is gone"):
        runner.run(batch, LayerMarks((1, layers), failing))


@every_set
def test_a_failed_row_does_not_spread(tiny_ref: ModelRef, instructions: InstructionSet) -> None:
    """Keys and values that are not numbers stay with their sequence, also when their pages are used again."""
    driver = Driver(load(tiny_ref, instructions))
    expected = driver.feed("before", prompt(21))
    driver.runner.slab_data[0].view(torch.bfloat16)[driver.runner.slabs[0].unit_bytes // 2 :] = float("nan")
    logits = driver.step(driver.rows("before", prompt(3)), driver.rows("again", prompt(21)))
    assert logits[0].isnan().any()
    assert same(logits[1], expected)
    assert expected.shape == (VOCABULARY,)

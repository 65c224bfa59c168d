"""LoRA adapters in every backend: what merged weights compute, and the same for a row whatever stands beside it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.quantisation import quantise
from engine.runner import ModelRunner
from engine.step import StepLimits, build_step
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.adapter_files import Tiny, merged, opened, write
from tests.engine.native_sets import InstructionSet, every_set, needs_compiler, only
from tests.engine.test_native_model import feed_in_parts, pages_of, same
from tests.engine.tiny_models import Driver, prompt
from tests.reference import all_logits

pytestmark = pytest.mark.slow

TINY = {
    "full": Tiny(1),
    "patterns": Tiny(2, rank=6, alpha=3.0, ranks={"k_proj": 2, "down_proj": 9}, alphas={"up_proj": 5.0}, by_root=True),
    "few": Tiny(3, modules=("v_proj", "up_proj"), rank=1, layers=(1,)),
}
NAMES = ("", *TINY)
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"head_dim": 32, "hidden_size": 90, "intermediate_size": 70}),
    "biases": ("llama-biases", {"head_dim": 64, "hidden_size": 66, "intermediate_size": 100}),
}


class Served:
    """A tiny model, its adapters in folders, and what each should compute."""

    def __init__(self, folder: Path, variant: str, **changes: object) -> None:
        self.model = tiny_models.build(variant, **changes)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        self.ref: ModelRef = tiny_models.save(copy.deepcopy(self.model).to(torch.bfloat16), folder / "model")
        self.adapters = opened({name: write(folder / name, tiny, self.model) for name, tiny in TINY.items()})

    def load(self, **settings: Any) -> ModelRunner:
        return tiny_models.load(self.ref, total_pages=600, **{"adapters": self.adapters, **settings})

    def expected(self, name: str, ids: Sequence[int], int8: bool) -> torch.Tensor:
        base = in_int8(self.model) if int8 else self.model
        return all_logits(merged(base, TINY[name]) if name else base, ids)


def in_int8(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose linear layers are what their int8 values and scales mean."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for module in copied.modules():
            if isinstance(module, torch.nn.Linear):
                small = quantise(module.weight)
                module.weight.copy_(small.values * small.scales[:, None])
    return copied


@pytest.fixture(scope="module", params=VARIANTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    variant, changes = VARIANTS[request.param]
    return Served(tmp_path_factory.mktemp(request.param), variant, **changes)


def native(served: Served, instructions: InstructionSet, threads: int = 1, **settings: Any) -> ModelRunner:
    return served.load(dtype="bfloat16", registry=only(instructions, threads), **settings)


def close(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def compute_merged(driver: Driver, served: Served, tolerance: float, int8: bool = False) -> None:
    """Prompts of all adapters in one step, then a token of each."""
    ids = prompt(70)
    driver.adapters = {f"of {name}": name for name in TINY}
    logits = driver.step(*(driver.rows(f"of {name}", ids[:40]) for name in NAMES))
    after = driver.step(*(driver.rows(f"of {name}", ids[40:41]) for name in NAMES))
    all_expected = {name: served.expected(name, ids, int8) for name in NAMES}
    for place, name in enumerate(NAMES):
        close(logits[place], all_expected[name][39], tolerance)
        close(after[place], all_expected[name][40], tolerance)
        if name:
            assert float((all_expected[name][40] - all_expected[""][40]).abs().max()) > 10 * tolerance


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_logits_are_those_of_merged_weights(served: Served, backend: str) -> None:
    compute_merged(Driver(served.load(dtype="float32", backend=backend)), served, 1e-4)


@needs_compiler
@every_set
def test_native_logits_are_those_of_merged_weights(served: Served, instructions: InstructionSet) -> None:
    compute_merged(Driver(native(served, instructions)), served, 4e-2)


def test_torch_computes_them_in_bfloat16_beside_int8_weights(served: Served) -> None:
    plain = Driver(served.load(dtype="bfloat16", backend="torch"))
    small = Driver(served.load(dtype="bfloat16", backend="torch", weight_quantisation="int8"))
    compute_merged(plain, served, 4e-2)
    compute_merged(small, served, 4e-2, int8=True)


@needs_compiler
@every_set
def test_native_computes_them_beside_int8_weights(served: Served, instructions: InstructionSet) -> None:
    compute_merged(Driver(native(served, instructions, weight_quantisation="int8")), served, 4e-2, int8=True)


def beside_one_another(one: Driver, many: Driver) -> None:
    """Every adapter's rows, and those of none, alone in `one` and mixed in `many`: the same bits, pages too."""
    texts = {f"{name}/{length}": prompt(length + 1, seed=3) for length in (1, 17, 33, 65) for name in NAMES}
    for driver in (one, many):
        driver.adapters = {text: text.partition("/")[0] for text in texts}
    alone = {}
    for text, ids in texts.items():
        one.feed(text, ids[:-1])
        alone[text] = one.feed(text, ids[-1:])
    many.step(*(many.rows(text, ids[:-1]) for text, ids in texts.items()))
    for text, logits in zip(texts, many.step(*(many.rows(text, ids[-1:]) for text, ids in texts.items())), strict=True):
        assert same(logits, alone[text]), text
        assert torch.equal(pages_of(many, text), pages_of(one, text)), text


@needs_compiler
@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_reads_the_same_alone_and_beside_other_adapters(served: Served, instructions: InstructionSet, threads: int) -> None:
    beside_one_another(Driver(native(served, instructions)), Driver(native(served, instructions, threads)))


@needs_compiler
@every_set
def test_rows_without_an_adapter_are_as_if_none_were_loaded(served: Served, instructions: InstructionSet) -> None:
    plain, loaded = Driver(native(served, instructions, adapters=())), Driver(native(served, instructions))
    loaded.adapters = {"other": "full"}
    for count in (40, 1):
        ids = prompt(count, 5)
        expected = plain.feed("base", ids)
        assert same(loaded.step(loaded.rows("other", ids), loaded.rows("base", ids))[1], expected)
    assert torch.equal(pages_of(plain, "base"), pages_of(loaded, "base"))


@needs_compiler
@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_of_an_adapter_may_be_cut_anywhere(served: Served, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(native(served, instructions, threads))
    ids = prompt(133)
    cuts = {"halves": (64, 64, 5), "odd": (37, 90, 1, 5), "singles": (100, *[1] * 33)}
    driver.adapters = dict.fromkeys(("whole", *cuts), "patterns")
    whole = driver.feed("whole", ids)
    pages = pages_of(driver, "whole")
    for name, sizes in cuts.items():
        assert same(feed_in_parts(driver, name, ids, sizes), whole), name
        assert torch.equal(pages_of(driver, name), pages), name


@needs_compiler
@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_whole_step_with_adapters_is_its_parts_bit_for_bit(served: Served, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(native(served, instructions, threads))
    runner = driver.runner
    driver.adapters = {"decoding": "full", "new": "patterns", "silent": "few", "going on": "full"}
    driver.step(driver.rows("decoding", prompt(37)), driver.rows("base", prompt(9)))
    driver.feed("going on", prompt(23, 1))
    rows = (
        driver.rows("decoding", prompt(1, 2)),
        driver.rows("base", prompt(1, 8)),
        driver.rows("new", prompt(50, 3)),
        driver.rows("silent", prompt(33, 4), wants_logits=False),
        driver.rows("going on", prompt(20, 5)),
    )
    group, names = runner.layout.groups[0], frozenset(TINY)
    limits = StepLimits(runner.vocabulary_size, runner.context_tokens, group.page_tokens, runner.slabs[0].units, adapters=names)
    step = build_step(Batch(rows), limits)
    pool = runner.slab_data[0]
    before = pool.clone()
    with torch.inference_mode():
        whole, after = runner.decoder.forward((step,)).clone(), pool.clone()
        pool.copy_(before)
        parts = runner.decoder.compose((step,))
    assert same(whole, parts)
    assert torch.equal(after, pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_torch_too_a_row_of_an_adapter_reads_the_same_among_others(served: Served, dtype: str) -> None:
    one, many = (Driver(served.load(dtype=dtype, backend="torch")) for _ in range(2))
    for driver in (one, many):
        driver.adapters = {f"{name}": name for name in TINY}
    ids = prompt(31)
    alone = {}
    for name in NAMES:
        one.feed(name, ids[:-1])
        alone[name] = one.feed(name, ids[-1:])
    for name in NAMES:
        many.feed(name, ids[:-1])
    for name, logits in zip(NAMES, many.step(*(many.rows(name, ids[-1:]) for name in NAMES)), strict=True):
        assert same(logits, alone[name]), name


def test_drafts_are_computed_by_the_adapter_of_their_sequence(served: Served) -> None:
    runner = served.load(dtype="float32", backend="torch")
    driver = Driver(runner, adapters={"a": "full", "b": "full"})
    ids = prompt(20)
    driver.feed("a", ids)
    driver.feed("b", ids)
    rows = driver.rows("a", prompt(3, 1))
    drafts = runner.run(Batch((type(rows)(rows.sequence, rows.token_ids, 20, rows.pages, True, draft_tokens=2, adapter="full"),)))
    for place, token in enumerate(prompt(3, 1)):
        assert same(drafts[place], driver.feed("b", [token]))


def test_a_row_of_an_adapter_that_is_not_loaded_is_refused(served: Served) -> None:
    driver = Driver(served.load(dtype="float32", backend="torch", adapters=()), adapters={"a": "full"})
    with pytest.raises(ValueError, match="sequence a has the adapter 'full', which is not loaded"):
        driver.feed("a", prompt(3))

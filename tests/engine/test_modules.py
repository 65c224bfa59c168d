"""Architectures that only transformers computes, over our pages, against transformers by itself on the same weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import Batch, LayerMarks, Rows
from engine.layout import GroupKind, GroupLayout, Layout
from engine.native.instruction_sets import PLAIN, sets_here
from engine.runner import ModelRunner
from engine.weights import LoadProgress
from models import ModelRef, ModuleConfig, load_config, resolve
from tests.engine import tiny_models, tiny_modules
from tests.engine.native_sets import has_compiler
from tests.engine.test_architectures import assert_close
from tests.engine.tiny_models import CONTEXT, VOCABULARY, Driver, greedy_with, prompt
from tests.engine.tiny_modules import FAMILIES
from tests.reference import all_logits, greedy

PAGE = 8
LENGTH = 4 * PAGE + 3

HAS_NATIVE = has_compiler() and any(each is not PLAIN for each in sets_here())

Served = tuple[PreTrainedModel, ModelRef, ModelRunner]


@pytest.fixture(params=sorted(FAMILIES), scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_modules.build(request.param)
    ref = tiny_models.save(model, tmp_path_factory.mktemp(request.param))
    yield model, ref, tiny_models.load(ref, page_tokens=PAGE, total_pages=100)


def test_whole_prompts(served: Served) -> None:
    model, _, runner = served
    ids = prompt(LENGTH)
    expected = all_logits(model, ids)
    driver = Driver(runner)
    for length in (1, PAGE - 1, PAGE, PAGE + 1, LENGTH):
        assert_close(driver.feed(f"prompt of {length}", ids[:length]), expected[length - 1])


def test_chunks_at_page_borders(served: Served) -> None:
    model, _, runner = served
    ids = prompt(LENGTH)
    expected = all_logits(model, ids)[-1]
    driver = Driver(runner)
    for first in (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, LENGTH - 1):
        begun = driver.step(driver.rows(f"from {first}", ids[:first], wants_logits=False))
        assert begun.shape == (0, runner.vocabulary_size)
        assert_close(driver.feed(f"from {first}", ids[first:]), expected)


def test_decode_rows_beside_chunks(served: Served) -> None:
    """Decode rows of unlike lengths, a first chunk, a chunk that wants no logits and a last chunk, in no order."""
    model, _, runner = served
    texts = {name: prompt(25, seed) for seed, name in enumerate(("long", "short", "first", "middle", "last"))}
    expected = {name: all_logits(model, ids) for name, ids in texts.items()}
    driver = Driver(runner)
    for name, length in (("long", 21), ("short", 2), ("middle", 3), ("last", 9)):
        driver.feed(name, texts[name][:length])
    logits = driver.step(
        driver.rows("first", texts["first"][:7]),
        driver.rows("long", texts["long"][21:22]),
        driver.rows("middle", texts["middle"][3:9], wants_logits=False),
        driver.rows("last", texts["last"][9:25]),
        driver.rows("short", texts["short"][2:3]),
    )
    assert_close(logits, torch.stack([expected["first"][6], expected["long"][21], expected["last"][24], expected["short"][2]]))
    assert_close(driver.feed("middle", texts["middle"][9:10]), expected["middle"][9])


def test_the_whole_context(served: Served) -> None:
    model, _, runner = served
    ids = prompt(CONTEXT, seed=2)
    assert_close(Driver(runner).feed("a", ids), all_logits(model, ids)[-1])


@pytest.mark.slow
def test_greedy_text_behind_pages_that_another_runner_filled(served: Served) -> None:
    """A prefill member's pages in a decode member's memory, layer for layer as its marks told that they were written."""
    model, ref, prefill = served
    ids = prompt(2 * PAGE + 3, seed=1)
    decode = tiny_models.load(ref, page_tokens=PAGE, total_pages=100)
    assert decode.layout == prefill.layout
    group = prefill.layout.groups[0]
    layer_bytes = group.page_bytes // group.layers
    source, target = (runner.slab_data[0].view(-1, group.layers, layer_bytes) for runner in (prefill, decode))
    driver = Driver(decode)
    rows = driver.rows("a", ids)
    pages = torch.tensor(rows.pages[0])
    pushed: list[int] = []

    def push(layers: int) -> None:
        target[pages, len(pushed) : layers] = source[pages, len(pushed) : layers]
        pushed.extend(range(len(pushed), layers))

    logits = prefill.run(Batch((rows,)), LayerMarks(tuple(range(1, group.layers + 1)), push))[0]
    assert pushed == list(range(group.layers))
    first = int(logits.argmax())
    said = [first, *greedy_with(partial(driver.feed, "a"), [first], 15)]
    assert said == greedy(model, ids, 16)


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    ref = tiny_models.save(tiny_modules.build("gpt_neox"), tmp_path_factory.mktemp("neox"))
    return tiny_models.load(ref, page_tokens=PAGE, total_pages=100)


@pytest.mark.parametrize("wanted", [(1, 3), (2,), (3,)])
def test_marks_come_when_the_layers_are_written(wanted: tuple[int, ...], neox: ModelRunner) -> None:
    group = neox.layout.groups[0]
    driver = Driver(neox)
    rows = driver.rows("a", prompt(PAGE))
    page = neox.slab_data[0].view(-1, group.layers, group.page_bytes // group.layers)[rows.pages[0][0]]
    page.zero_()
    told: list[tuple[int, list[bool]]] = []
    neox.run(Batch((rows,)), LayerMarks(wanted, lambda layers: told.append((layers, page.any(dim=1).tolist()))))
    assert told == [(layers, [layer < layers for layer in range(group.layers)]) for layers in wanted]


def test_a_row_has_the_same_bits_alone_among_others_and_before_drafts(neox: ModelRunner) -> None:
    ids = prompt(PAGE + 2)
    driver = Driver(neox)
    for name in ("alone", "among", "drafted"):
        driver.feed(name, ids)
    alone = driver.feed("alone", [7])
    others = [driver.rows(f"other {number}", prompt(1 + 3 * number)) for number in range(5)]
    assert torch.equal(driver.step(driver.rows("among", [7]), *others)[0], alone)
    rows = driver.rows("drafted", [7, 8, 9])
    logits = neox.run(Batch((Rows(rows.sequence, rows.token_ids, rows.first_position, rows.pages, True, draft_tokens=2),)))
    assert logits.shape == (3, VOCABULARY)
    assert torch.equal(logits[0], alone)
    assert torch.equal(logits[1], driver.feed("alone", [8]))


def test_what_the_rest_of_a_member_sees(neox: ModelRunner, tmp_path: Path) -> None:
    """Limits and layout come from config.json; the pages are empty after the check, and nothing is counted by part."""
    ref = tiny_models.save(tiny_modules.build("gpt_neox"), tmp_path)
    config = load_config(ref)
    assert config == ModuleConfig("gpt_neox", 3, 6, 6, 8, VOCABULARY, CONTEXT, 1, frozenset({2}))
    progress: list[LoadProgress] = []
    runner = tiny_models.load(ref, page_tokens=PAGE, total_pages=3, progress=progress.append)
    assert progress == [LoadProgress(0, 1), LoadProgress(1, 1)]
    assert (runner.vocabulary_size, runner.context_tokens, runner.backend) == (VOCABULARY, CONTEXT, "torch")
    assert runner.layout == Layout("0" * 64, (GroupLayout(GroupKind.FULL, 3, 6, 8, PAGE, "float32"),), "modules of gpt_neox")
    assert runner.layout.prefix_keys is not None
    assert not runner.slab_data[0].any()
    assert runner.statistics().model_part_seconds == {}


def test_two_loads_of_a_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_modules.build("gpt_neox").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    first, second = (resolve(str(folder), cache=tmp_path / f"cache {number}") for number in range(2))
    assert first == second
    assert tiny_models.load(first).layout.fingerprint == tiny_models.load(second).layout.fingerprint


def test_rotary_frequencies_that_change_at_a_length_bound_the_context(tmp_path: Path) -> None:
    """In a mixed step one long sequence would change those of all others."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny_modules.build(
        "phi3", rope_parameters={**rope, "original_max_position_embeddings": 40}, original_max_position_embeddings=40
    )
    runner = tiny_models.load(tiny_models.save(model, tmp_path), page_tokens=PAGE)
    assert runner.context_tokens == 40
    ids = prompt(41)
    assert_close(Driver(runner).feed("a", ids[:40]), all_logits(model, ids[:40])[-1])
    with pytest.raises(ValueError, match="reaches 41 tokens; context_tokens is 40"):
        Driver(runner).feed("b", ids)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["olmo2", "gpt_neox", "mixtral"])
def test_bfloat16(model_type: str, tmp_path: Path) -> None:
    """By the native kernels, where a model's heads fit them, and by torch; both within the rounding of the modules themselves."""
    model = tiny_modules.build(model_type, hidden_size=128, num_attention_heads=4, sliding_window=None)
    ref = tiny_models.save(model, tmp_path)
    ids = prompt(LENGTH)
    exact, rounded = all_logits(model, ids), all_logits(model.to(torch.bfloat16), ids)
    allowed = 3 * (rounded - exact).norm(dim=1).median()
    for backend in ("auto", "torch"):
        runner = tiny_models.load(ref, dtype="bfloat16", backend=backend)
        driver = Driver(runner)
        ours = torch.stack(
            [driver.feed("a", ids[:17]), *(driver.feed("a", ids[place : place + 1]) for place in range(17, LENGTH))]
        )
        assert (ours - exact[16:]).norm(dim=1).median() <= allowed, runner.backend
        assert runner.backend.startswith("native") == (backend == "auto" and HAS_NATIVE)

"""Products and whole steps with int8 weights: right, and the same for a row whatever stands beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backend import Setup
from engine.backend_check import check_backend
from engine.native.backend import NativeBackend
from engine.native.library import open_library
from engine.quantisation import WeightQuantisation, quantise
from engine.reference_backend import REGISTRATION as REFERENCE
from engine.runner import ModelRunner
from engine.torch_backend import REGISTRATION as TORCH
from engine.torch_linear import QuantisedLinears, choose_linears
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.native_sets import InstructionSet, every_set, needs_compiler, only, registration_of
from tests.engine.test_native_model import compare_with_parts, feed_in_parts, pages_of, same
from tests.engine.tiny_models import Driver, prompt

pytestmark = pytest.mark.slow

INT8 = WeightQuantisation.INT8
# inputs, outputs: multiples of every block, of none, and a panel that is too large to be kept widened.
SHAPES = ((64, 96), (576, 576), (1536, 70), (90, 33), (4160, 40))
ROW_COUNTS = (*range(1, 36), 63, 64, 65, 100, 130)


def setup(dtype: torch.dtype = torch.bfloat16) -> Setup:
    pool = torch.zeros(3, 2, 16, 2, 3, 64, dtype=dtype)
    return Setup(torch.device("cpu"), dtype, 9, 3, 64, 1e-5, pool, torch.zeros(32, 64), quantisation=INT8)


def backend(instructions: InstructionSet, threads: int = 1) -> NativeBackend:
    return NativeBackend(setup(), open_library(instructions), threads)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """To the rounding of the result, and of float32 sums."""
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=2e-5 * float(exact.abs().max()))


@needs_compiler
@every_set
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_native_products_are_those_of_values_and_scales(instructions: InstructionSet, inputs: int, outputs: int) -> None:
    ours = backend(instructions)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    weight[3] = 0
    small = quantise(weight)
    plain, biased = ours.pack(weight, None), ours.pack(weight, bias)
    assert plain.weight.dtype == torch.int8
    for rows in (1, 5, 33, 70):
        x, residual = random(rows, inputs, seed=3), random(rows, outputs, seed=4)
        product = x.double() @ (small.values.double() * small.scales.double()[:, None]).T
        close(ours.linear(x, plain), product)
        close(ours.linear(x, biased), product + bias.double())
        close(ours.linear_add(x, biased, residual.clone()), product + bias.double() + residual.double())
        logits = ours.logits(x, ours.pack_head(weight))
        close(logits, product)
        # Each weight is half a scale away at most, so a sum is so far away at most; and what float32 rounds.
        bound = x.double().abs().sum(dim=1)[:, None] * small.scales.double() * (0.5 + 1e-3)
        assert ((logits.double() - x.double() @ weight.double().T).abs() <= bound + 1e-9).all()


@needs_compiler
@every_set
@pytest.mark.parametrize(("inputs", "intermediate"), [(64, 96), (576, 1536), (90, 33)])
def test_gates_and_ups_have_scales_of_their_own(instructions: InstructionSet, inputs: int, intermediate: int) -> None:
    ours = backend(instructions)
    weight, bias = random(2 * intermediate, inputs, seed=1), random(2 * intermediate, seed=2)
    weight *= torch.logspace(-1, 1, 2 * intermediate).to(torch.bfloat16)[:, None]
    small = quantise(weight)
    for rows, used in ((1, None), (7, bias), (40, bias)):
        x = random(rows, inputs, seed=3) / 32
        sums = x.double() @ (small.values.double() * small.scales.double()[:, None]).T
        gate, up = (sums + (0 if used is None else used.double())).chunk(2, dim=1)
        close(ours.gated(x, ours.pack_gate_up(weight, used)), gate * torch.sigmoid(gate) * up)


@needs_compiler
@every_set
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("inputs", [288, 4160])
def test_a_row_is_the_same_bit_for_bit_beside_any_number_of_others(
    instructions: InstructionSet, threads: int, inputs: int
) -> None:
    alone, among = backend(instructions), backend(instructions, threads)
    outputs, most = 96, max(ROW_COUNTS)
    weight, gates = alone.pack(random(outputs, inputs), random(outputs)), alone.pack_gate_up(random(outputs, inputs), None)
    x = random(most, inputs, seed=3)
    rows = [x[row : row + 1] for row in range(most)]
    expected = [torch.cat([each(row, packed) for row in rows]) for each, packed in ((alone.linear, weight), (alone.gated, gates))]
    for count in ROW_COUNTS:
        assert torch.equal(among.linear(x[:count], weight), expected[0][:count])
        assert torch.equal(among.gated(x[:count], gates), expected[1][:count])


@needs_compiler
@every_set
def test_the_check_at_the_start_covers_the_native_backend(instructions: InstructionSet) -> None:
    check_backend(registration_of(instructions), setup())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_the_start_covers_the_torch_backend(dtype: torch.dtype) -> None:
    check_backend(TORCH, setup(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_scales_a_row_alone_as_among_others(dtype: torch.dtype) -> None:
    plain = choose_linears(torch.device("cpu"), dtype)
    linears, weight, bias = QuantisedLinears(plain), random(96, 64).to(dtype), random(96, seed=1).to(dtype)
    packed, values = linears.pack(weight, bias), plain.pack(quantise(weight).values.to(dtype), None)
    for rows in (1, 2, 3, 17):
        x = random(rows, 64, seed=2).to(dtype)
        sums = plain.apply(x, values)
        singly = [(row.float() * quantise(weight).scales + bias.float()).to(dtype) for row in sums]
        assert torch.equal(linears.apply(x, packed), torch.stack(singly))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    model = tiny_models.build("llama-biases", head_dim=32, hidden_size=90, intermediate_size=70)
    return tiny_models.save(model.to(torch.bfloat16), tmp_path_factory.mktemp("tiny"))


def load(ref: ModelRef, instructions: InstructionSet, threads: int = 1) -> ModelRunner:
    settings = {"dtype": "bfloat16", "registry": only(instructions, threads), "weight_quantisation": "int8"}
    return tiny_models.load(ref, total_pages=400, **settings)


@needs_compiler
@every_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_reads_the_same_however_it_is_fed(tiny: ModelRef, instructions: InstructionSet, threads: int) -> None:
    driver = Driver(load(tiny, instructions, threads))
    ids = prompt(133)
    whole = driver.feed("whole", ids)
    pages = pages_of(driver, "whole")
    for name, sizes in {"odd": (37, 90, 1, 5), "singles": (100, *[1] * 33)}.items():
        assert same(feed_in_parts(driver, name, ids, sizes), whole), name
        assert torch.equal(pages_of(driver, name), pages), name
    driver.feed("decoding", prompt(20))
    packed = driver.step(driver.rows("decoding", prompt(1)), driver.rows("packed", ids), driver.rows("short", prompt(3, 1)))
    assert same(packed[1], whole)
    compare_with_parts(driver, driver.rows("decoding", prompt(1, 2)), driver.rows("new", prompt(50, 3)))


@needs_compiler
@every_set
def test_native_and_reference_mean_the_same_by_int8(tiny: ModelRef, instructions: InstructionSet) -> None:
    ids = prompt(40)
    ours = Driver(load(tiny, instructions)).feed("a", ids)
    by_definition = tiny_models.load(tiny, dtype="bfloat16", backend=REFERENCE.name, weight_quantisation="int8")
    expected = Driver(by_definition).feed("a", ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("variant", ["llama", "gemma3", "deepseek-v3"])
def test_every_architecture_of_ours_is_served_and_has_a_layout_of_its_own(variant: str, tmp_path: Path) -> None:
    ref = tiny_models.save(tiny_models.build(variant), tmp_path)
    plain, quantised = (tiny_models.load(ref, weight_quantisation=kind) for kind in WeightQuantisation)
    assert quantised.layout == replace(plain.layout, weight_quantisation="int8")
    assert quantised.layout.fingerprint != plain.layout.fingerprint
    assert quantised.layout.prefix_keys is None or quantised.layout.prefix_keys != plain.layout.prefix_keys
    said, expected = (Driver(runner).feed("a", prompt(30)) for runner in (quantised, plain))
    assert not torch.equal(said, expected)
    torch.testing.assert_close(said, expected, rtol=0, atol=0.1 * float(expected.abs().max()))


def test_an_unknown_kind_of_weights_is_refused(tiny: ModelRef) -> None:
    with pytest.raises(ValueError, match=r"^weight_quantisation is 'int4'; choose one of off, int8$"):
        tiny_models.load(tiny, weight_quantisation="int4")


def test_linear_layers_alone_are_quantised(tiny: ModelRef) -> None:
    weights = tiny_models.load(tiny, weight_quantisation="int8", backend="torch").decoder.weights
    plain = tiny_models.load(tiny, backend="torch").decoder.weights
    assert torch.equal(weights.embedding, plain.embedding) and torch.equal(weights.final_norm, plain.final_norm)
    for layer, other in zip(weights.layers, plain.layers, strict=True):
        assert torch.equal(layer.attention_norm, other.attention_norm) and torch.equal(layer.mlp_norm, other.mlp_norm)
        packed = (layer.qkv, layer.output, layer.gate_up, layer.down)
        assert all(each.scales is not None and each.scales.shape == (each.out_features,) for each in packed)
    assert weights.head.scales is not None

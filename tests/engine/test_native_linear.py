"""The native products and norms: right, and the same for a row whatever stands beside it."""

import pytest
import torch

from engine.backend import Setup
from engine.native.backend import NativeBackend
from engine.native.library import open_library
from tests.engine.native_sets import InstructionSet, every_set, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

ROWS = 512
ROW_COUNTS = (*range(1, 66), 100, 256, 511, 512)
# inputs, outputs: multiples of every block, and of none.
SHAPES = ((64, 96), (576, 576), (1536, 70), (90, 33), (48, 16))


def backend(instructions: InstructionSet, threads: int = 1) -> NativeBackend:
    pool = torch.zeros(3, 2, 16, 2, 1, 32, dtype=torch.bfloat16)
    setup = Setup(torch.device("cpu"), torch.bfloat16, 1, 1, 32, 1e-5, pool, torch.zeros(32, 32))
    return NativeBackend(setup, open_library(instructions), threads)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """To the rounding of the result, and of float32 sums."""
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=2e-5 * float(exact.abs().max()))


@every_set
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_right(instructions: InstructionSet, inputs: int, outputs: int) -> None:
    ours = backend(instructions)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    for rows in (1, 5, 33, 70):
        x, residual = random(rows, inputs, seed=3), random(rows, outputs, seed=4)
        product = x.double() @ weight.double().T
        close(ours.linear(x, ours.pack(weight, None)), product)
        close(ours.linear(x, ours.pack(weight, bias)), product + bias.double())
        close(ours.linear_add(x, ours.pack(weight, bias), residual.clone()), product + bias.double() + residual.double())
        close(ours.logits(x, ours.pack_head(weight)), product)


@every_set
@pytest.mark.parametrize(("inputs", "intermediate"), [(64, 96), (576, 1536), (90, 33), (48, 10)])
def test_gates_and_ups_are_joined(instructions: InstructionSet, inputs: int, intermediate: int) -> None:
    ours = backend(instructions)
    weight, bias = random(2 * intermediate, inputs, seed=1), random(2 * intermediate, seed=2)
    for rows, used in ((1, None), (7, bias), (40, bias)):
        x = random(rows, inputs, seed=3) / 8
        sums = x.double() @ weight.double().T + (0 if used is None else used.double())
        gate, up = sums.chunk(2, dim=1)
        close(ours.gated(x, ours.pack_gate_up(weight, used)), gate * torch.sigmoid(gate) * up)


@every_set
@pytest.mark.parametrize("columns", [576, 48, 90, 7])
def test_norms_are_right(instructions: InstructionSet, columns: int) -> None:
    x, weight = random(9, columns), random(columns, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(backend(instructions).norm(x, weight), exact)


@every_set
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_bit_for_bit_beside_any_number_of_others(instructions: InstructionSet, threads: int) -> None:
    alone, among = backend(instructions), backend(instructions, threads)
    inputs, outputs = 288, 224
    weight, gates = (
        alone.pack(random(outputs, inputs, seed=1), random(outputs)),
        alone.pack_gate_up(random(outputs, inputs), None),
    )
    x, residual = random(ROWS, inputs, seed=3), random(ROWS, outputs, seed=4)
    singles = [
        (
            alone.linear(x[row : row + 1], weight),
            alone.linear_add(x[row : row + 1], weight, residual[row : row + 1].clone()),
            alone.gated(x[row : row + 1], gates),
            alone.logits(x[row : row + 1], weight),
            alone.norm(x[row : row + 1], x[0]),
        )
        for row in range(ROWS)
    ]
    expected = [torch.cat(parts) for parts in zip(*singles, strict=True)]
    for rows in ROW_COUNTS:
        some = x[:rows]
        results = (
            among.linear(some, weight),
            among.linear_add(some, weight, residual[:rows].clone()),
            among.gated(some, gates),
            among.logits(some, weight),
            among.norm(some, x[0]),
        )
        for ours, single in zip(results, expected, strict=True):
            assert torch.equal(ours, single[:rows])


@every_set
def test_a_row_with_many_inputs_is_the_same_beside_others(instructions: InstructionSet) -> None:
    """More inputs than any kernel takes at a time."""
    ours, inputs, outputs = backend(instructions), 8224, 40
    weight, x = ours.pack(random(outputs, inputs, seed=1), None), random(140, inputs, seed=2)
    close(ours.logits(x[:1], weight), x[:1].double() @ random(outputs, inputs, seed=1).double().T)
    singles = torch.cat([ours.logits(x[row : row + 1], weight) for row in range(140)])
    for rows in (2, 13, 30, 70, 140):
        assert torch.equal(ours.logits(x[:rows], weight), singles[:rows])


@every_set
def test_what_is_not_a_number_stays_in_its_row(instructions: InstructionSet) -> None:
    ours = backend(instructions)
    x, weight = random(20, 90), ours.pack(random(40, 90, seed=1), None)
    expected = ours.linear(x, weight)
    x[7] = float("nan")
    broken = ours.linear(x, weight)
    assert broken[7].isnan().all()
    assert torch.equal(torch.cat([broken[:7], broken[8:]]), torch.cat([expected[:7], expected[8:]]))

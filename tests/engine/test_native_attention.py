"""The native rotation and attention against float64, and the same bits for a row whatever stands beside it."""

import numpy as np
import pytest
import torch

from engine.layout import pages_for
from engine.native.build import BuildFailed
from engine.native.instruction_sets import sets_here
from tests.engine.native_ops import NativeOps, Shape, Span

SHAPES = (
    Shape(9, 3, 64),
    Shape(4, 4, 32),
    Shape(8, 1, 64, page_tokens=32),
    Shape(16, 2, 128, page_tokens=64),
    Shape(6, 2, 96),
    Shape(40, 8, 64),
    Shape(4, 2, 256),
    Shape(20, 1, 32),
)
# bfloat16 keeps 8 bits: results may be off by half a step of the largest value, weights by as much again.
TOLERANCE = 2**-7


@pytest.fixture(scope="module", params=sets_here(), ids=lambda each: each.name)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    try:
        return NativeOps(request.param)
    except BuildFailed as error:
        pytest.skip(str(error))


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.heads}x{shape.kv_heads}x{shape.head_dim}p{shape.page_tokens}")
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


class World:
    """A pool with random rows, and sequences whose pages lie in it in random order."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        counts = [pages_for(length, shape.page_tokens) for length in lengths]
        order = iter((torch.randperm(sum(counts), generator=self._generator) + 1).tolist())
        self.tables = [tuple(next(order) for _ in range(count)) for count in counts]
        self.pool = shape.pool(sum(counts) + 1)
        self.pool.copy_(self.random(*self.pool.shape))
        self.lengths = lengths
        self.queries = [self.random(length, shape.qkv_columns) for length in lengths]

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator).to(torch.bfloat16)

    def span(self, sequence: int, first: int, count: int) -> Span:
        return Span(first, count, self.tables[sequence][: pages_for(first + count, self.shape.page_tokens)])

    def attend(self, ops: NativeOps, places: list[tuple[int, int, int]], layer: int = 1, parts: int = 1) -> list[torch.Tensor]:
        """`places`: (sequence, first position, rows). The results of each of them."""
        spans = [self.span(*place) for place in places]
        qkv = torch.cat([self.queries[sequence][first : first + count] for sequence, first, count in places])
        out = ops.attend(self.shape, self.pool, layer, spans, qkv, parts)
        return list(torch.split(out, [count for _, _, count in places]))

    def expected(self, sequence: int, layer: int = 1) -> torch.Tensor:
        """float64 [length, heads, head_dim]."""
        shape, length = self.shape, self.lengths[sequence]
        cached = self.pool[list(self.tables[sequence]), layer].flatten(0, 1)[:length].double()
        group = shape.heads // shape.kv_heads
        key, value = (cached[:, which].repeat_interleave(group, dim=1) for which in (0, 1))
        query = self.queries[sequence][:, : shape.heads * shape.head_dim].double().view(length, shape.heads, shape.head_dim)
        scores = torch.einsum("qhd,shd->hqs", query, key) * shape.head_dim**-0.5
        scores.masked_fill_(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return torch.einsum("hqs,shd->qhd", scores.softmax(-1), value)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((ours.double() - expected).abs().max() / expected.abs().max()) < TOLERANCE


def same(ours: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(ours.view(torch.int16), other.view(torch.int16))


def test_chunk_is_the_formula(ops: NativeOps, shape: Shape) -> None:
    world = World(shape, (1, 15, 33, 150))
    results = world.attend(ops, [(sequence, 0, length) for sequence, length in enumerate(world.lengths)])
    for sequence, result in enumerate(results):
        close(result, world.expected(sequence))


def test_single_row_is_the_formula(ops: NativeOps, shape: Shape) -> None:
    world = World(shape, (1, 2, 16, 17, 32, 33, 64, 65, 150, 300))
    results = world.attend(ops, [(sequence, length - 1, 1) for sequence, length in enumerate(world.lengths)])
    for sequence, result in enumerate(results):
        close(result, world.expected(sequence)[-1:])


def test_single_row_has_the_bits_of_the_chunk(ops: NativeOps, shape: Shape) -> None:
    world = World(shape, (170,))
    (whole,) = world.attend(ops, [(0, 0, 170)])
    for position in (0, 1, 15, 16, 31, 32, 47, 63, 64, 100, 127, 128, 129, 159, 160, 169):
        (row,) = world.attend(ops, [(0, position, 1)])
        same(row, whole[position : position + 1])


def test_bits_do_not_depend_on_how_a_prompt_is_cut(ops: NativeOps, shape: Shape) -> None:
    world = World(shape, (300,))
    (whole,) = world.attend(ops, [(0, 0, 300)])
    for sizes in ([64] * 4 + [44], [37, 100, 1, 162], [1, 2, 3, 4, 5, 285]):
        firsts = np.cumsum([0, *sizes])[:-1].tolist()
        pieces = [world.attend(ops, [(0, first, size)])[0] for first, size in zip(firsts, sizes, strict=True)]
        same(torch.cat(pieces), whole)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_bits_do_not_depend_on_the_batch_or_on_parts(ops: NativeOps, shape: Shape, parts: int) -> None:
    world = World(shape, (50, 333, 17, 140, 1), seed=parts)
    places = [(0, 49, 1), (2, 16, 1), (4, 0, 1), (1, 200, 133), (3, 100, 40)]
    together = world.attend(ops, places, parts=parts)
    for place, result in zip(places, together, strict=True):
        (alone,) = world.attend(ops, [place])
        same(result, alone)


def test_rows_behind_the_end_do_not_leak(ops: NativeOps, shape: Shape) -> None:
    """A page keeps what its last owner left behind the rows of this one, be it NaN."""
    world = World(shape, (70, 45))
    before = world.attend(ops, [(0, 40, 30), (1, 44, 1)])
    for sequence, length in enumerate(world.lengths):
        last_page = world.tables[sequence][(length - 1) // shape.page_tokens]
        world.pool[last_page, :, (length - 1) % shape.page_tokens + 1 :] = torch.nan
    world.pool[0] = torch.nan
    for old, new in zip(before, world.attend(ops, [(0, 40, 30), (1, 44, 1)]), strict=True):
        same(old, new)


def test_peaks_move_for_each_column_by_itself(ops: NativeOps) -> None:
    """Scores that grow with the position, faster in some columns than in others, move their running peaks again and again."""
    shape = Shape(9, 3, 64)
    length = 300
    world = World(shape, (length,))
    slopes = torch.rand((length, shape.heads, 1), generator=torch.Generator().manual_seed(2)) * 0.8
    world.queries[0][:, : shape.heads * shape.head_dim] = slopes.expand(-1, -1, shape.head_dim).flatten(1)
    for position in range(length):
        world.pool[world.tables[0][position // shape.page_tokens], :, position % shape.page_tokens, 0] = position / 16
    (whole,) = world.attend(ops, [(0, 0, length)])
    close(whole, world.expected(0))
    for position in range(0, length, 13):
        same(world.attend(ops, [(0, position, 1)])[0], whole[position : position + 1])
    for first, count in ((0, 77), (77, 2), (79, 221)):
        same(world.attend(ops, [(0, first, count)])[0], whole[first : first + count])


class Rotation:
    """Rows of several sequences, to be rotated and written into a pool that has other rows too."""

    places = ((0, 39, 1), (2, 0, 1), (1, 5, 18), (0, 0, 30))

    def __init__(self, shape: Shape, normed: bool) -> None:
        self.shape = shape
        self.world = World(shape, (40, 23, 1))
        generator = torch.Generator().manual_seed(1)
        self.rope = torch.randn((40, shape.head_dim), generator=generator)
        norms = torch.rand((shape.heads + shape.kv_heads, shape.head_dim), generator=generator) + 0.5
        self.norms = norms if normed else None
        self.qkv = torch.cat([self.world.queries[sequence][first : first + count] for sequence, first, count in self.places])

    def ours(self, ops: NativeOps, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated rows, and the pool."""
        pool = self.world.pool.clone()
        spans = [self.world.span(*place) for place in self.places]
        return ops.rotate_and_store(self.shape, pool, 1, spans, self.qkv, self.rope, self.norms, parts), pool

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in float64."""
        shape = self.shape
        wide = self.qkv.double().view(len(self.qkv), -1, shape.head_dim)
        turned, value = wide[:, : shape.heads + shape.kv_heads], wide[:, shape.heads + shape.kv_heads :]
        if self.norms is not None:
            turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + shape.rms_eps) * self.norms.double()
        positions = [first + row for _, first, count in self.places for row in range(count)]
        cosines, sines = self.rope[positions].double()[:, None].chunk(2, dim=-1)
        lower, upper = turned.chunk(2, dim=-1)
        turned = torch.cat([lower * cosines - upper * sines, upper * cosines + lower * sines], dim=-1)
        rows = torch.cat([turned, value], dim=1).flatten(1)
        pool = self.world.pool.double()
        owners = [sequence for sequence, _, count in self.places for _ in range(count)]
        for row, (sequence, position) in enumerate(zip(owners, positions, strict=True)):
            page = self.world.tables[sequence][position // shape.page_tokens]
            cached = rows[row, shape.heads * shape.head_dim :]
            pool[page, 1, position % shape.page_tokens] = cached.view(2, shape.kv_heads, shape.head_dim)
        return rows, pool


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_pages_are_the_formula(ops: NativeOps, shape: Shape, normed: bool) -> None:
    rotation = Rotation(shape, normed)
    rows, pool = rotation.ours(ops)
    expected_rows, expected_pool = rotation.expected()
    close(rows, expected_rows)
    close(pool, expected_pool)
    for parts in (2, 5):
        shared_rows, shared_pool = rotation.ours(ops, parts)
        same(shared_rows, rows)
        same(shared_pool, pool)

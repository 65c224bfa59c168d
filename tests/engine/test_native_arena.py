"""Memory for weights: one behind the other, each at a cache line, none shared."""

import itertools

import torch

from engine.native.arena import Arena


def test_weights_lie_one_behind_the_other_and_none_overlaps() -> None:
    arena = Arena(chunk_bytes=4096)
    shapes = [(3, 5), (64,), (1,), (2, 7, 11)]
    made = [arena.empty(shape, torch.bfloat16) for shape in shapes]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    for value, (shape, tensor) in enumerate(zip(shapes, made, strict=True)):
        assert tuple(tensor.shape) == shape and bool((tensor == value).all())
        assert tensor.data_ptr() % 64 == 0
    for before, after in itertools.pairwise(made):
        assert 0 <= after.data_ptr() - (before.data_ptr() + before.nbytes) < 64


def test_what_no_longer_fits_begins_a_chunk_and_what_is_larger_gets_its_own() -> None:
    arena = Arena(chunk_bytes=4096)
    small, large = arena.empty((4000,), torch.uint8), arena.empty((10_000,), torch.uint8)
    small.fill_(1)
    large.fill_(2)
    assert bool((small == 1).all()) and bool((large == 2).all())

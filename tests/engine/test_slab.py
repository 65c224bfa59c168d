"""Slabs and landing rows: alignment, addresses, limits."""

import pytest
import torch

from engine.landing import LandingRows
from engine.slab import ALIGNMENT_BYTES, SlabMemory, allocate_slab


@pytest.mark.parametrize(("units", "unit_bytes"), [(1, 1), (3, 4096), (7, 368_640)])
def test_a_slab_is_aligned_zeroed_and_as_large_as_asked(units: int, unit_bytes: int) -> None:
    slab = allocate_slab(units, unit_bytes)
    assert slab.memory.address % ALIGNMENT_BYTES == 0
    assert (slab.memory.size_bytes, slab.memory.units) == (units * unit_bytes, units)
    assert slab.data.data_ptr() == slab.memory.address
    assert slab.data.numel() == units * unit_bytes
    assert int(slab.data.count_nonzero()) == 0


def test_addresses_of_units() -> None:
    memory = SlabMemory(address=1000, size_bytes=40, unit_bytes=10)
    assert [memory.address_of(unit) for unit in (0, 3)] == [1000, 1030]
    for unit in (-1, 4):
        with pytest.raises(IndexError, match="slab of 4 units"):
            memory.address_of(unit)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="units is 0"):
        allocate_slab(0, 8)
    with pytest.raises(MemoryError, match="lower the number of pages"):
        allocate_slab(1 << 40, 1 << 20)


def test_landing_rows_are_registered_memory() -> None:
    landing = LandingRows(3, 5)
    landing.row(1).copy_(torch.arange(5.0))
    assert landing.slab.unit_bytes == 20
    assert landing.row(2).data_ptr() == landing.slab.address_of(2)
    assert landing.gather([1, 0]).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    copied = landing.gather([1])
    landing.row(1).zero_()
    assert copied.tolist() == [[0, 1, 2, 3, 4]]


def test_landing_rows_have_limits() -> None:
    landing = LandingRows(2, 4)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="table of 2 rows"):
            landing.row(index)
        with pytest.raises(IndexError, match="table of 2 rows"):
            landing.gather([0, index])
    with pytest.raises(ValueError, match="rows is 0"):
        LandingRows(0, 4)

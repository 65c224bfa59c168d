"""Memory that other processes may write into: allocated once, resident, aligned, never moved."""

import contextlib
import mmap
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SlabMemory:
    """A registered range: `size_bytes` at `address`, used in units (pages or rows) of `unit_bytes`."""

    address: int
    size_bytes: int
    unit_bytes: int

    @property
    def units(self) -> int:
        return self.size_bytes // self.unit_bytes

    def address_of(self, unit: int) -> int:
        """Address of one unit. Raises IndexError outside the slab."""
        if not 0 <= unit < self.units:
            raise IndexError(f"unit {unit} is outside the slab of {self.units} units")
        return self.address + unit * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab and its bytes as a tensor (uint8, one dimension). The tensor keeps the memory alive."""

    memory: SlabMemory
    data: torch.Tensor


def allocate_slab(units: int, unit_bytes: int, device: str = "cpu") -> Slab:
    """Zeroed, resident memory for `units` units, starting at a 2 MiB border.

    Every byte is written once here, so no step pays for a page fault, and a remote write never meets memory
    that does not exist yet. On the host it is memory of `host_bytes`.
    Raises ValueError for sizes below 1 and MemoryError when the machine does not have that much.
    """
    if units < 1 or unit_bytes < 1:
        raise ValueError(f"units is {units} and unit_bytes is {unit_bytes}; both must be at least 1")
    size_bytes = units * unit_bytes
    raw = host_bytes(size_bytes + ALIGNMENT_BYTES) if device == "cpu" else _device_bytes(size_bytes + ALIGNMENT_BYTES, device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    data = raw[start : start + size_bytes]
    data.zero_()
    return Slab(SlabMemory(data.data_ptr(), size_bytes, unit_bytes), data)


def host_bytes(size_bytes: int) -> torch.Tensor:
    """Anonymous memory as a tensor (uint8) that keeps it alive; it asks for huge pages where the kernel has them.

    Raises MemoryError when the machine does not have that much.
    """
    try:
        region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"cannot map {size_bytes} bytes: {error}; lower the number of pages") from error
    # A slab that fills no huge page would only pay for the zeroing of one.
    if hasattr(mmap, "MADV_HUGEPAGE") and size_bytes >= 2 * ALIGNMENT_BYTES:
        # A kernel without transparent huge pages refuses; small pages work as well.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def _device_bytes(size_bytes: int, device: str) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"cannot allocate {size_bytes} bytes on {device}; lower the number of pages") from error

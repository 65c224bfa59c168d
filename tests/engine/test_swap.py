"""The host area: whole pages go out and come back byte for byte, in the order of the copies."""

import pytest
import torch

from engine.layout import GroupKind, GroupLayout, Layout
from engine.page_copy import CopyKind, PageCopy
from engine.slab import allocate_slab
from engine.swap import SwapArea

PAGES = 7
GROUPS = (
    GroupLayout(GroupKind.FULL, 2, 1, 3, 4, "float32"),
    GroupLayout(GroupKind.LATENT, 1, 1, 5, 2, "bfloat16"),
)
LAYOUT = Layout("snapshot", GROUPS)


def slabs(device: str = "cpu") -> list[torch.Tensor]:
    """Random bytes, one slab for each group."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for group in GROUPS:
        slab = allocate_slab(PAGES, group.page_bytes, device)
        slab.data.copy_(torch.randint(0, 256, (slab.data.numel(),), dtype=torch.uint8, generator=generator))
        found.append(slab.data)
    return found


def page(slab: torch.Tensor, group: int, number: int) -> torch.Tensor:
    return slab.view(PAGES, GROUPS[group].page_bytes)[number]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_bytes_round_trip_in_every_group(device: str) -> None:
    data = slabs(device)
    before = [slab.clone() for slab in data]
    area = SwapArea(LAYOUT, data, 4)
    area.run([PageCopy(CopyKind.OUT, group, (5, 2, 3), (1, 0, 3)) for group in range(2)])
    for slab in data:
        slab.zero_()
    area.run([PageCopy(CopyKind.BACK, group, (1, 6, 4), (1, 0, 3)) for group in range(2)])
    for group in range(2):
        for source, target in ((5, 1), (2, 6), (3, 4)):
            assert torch.equal(page(data[group], group, target), page(before[group], group, source))
        for untouched in (0, 2, 3, 5):
            assert not page(data[group], group, untouched).any()


def test_copies_run_in_their_order() -> None:
    """One list may bring a page back into what another has just left, over a host page that was just read."""
    data = slabs()
    before = data[0].clone()
    area = SwapArea(LAYOUT, data, 1)
    area.run([PageCopy(CopyKind.OUT, 0, (1,), (0,))])
    area.run(
        [PageCopy(CopyKind.BACK, 0, (2,), (0,)), PageCopy(CopyKind.OUT, 0, (3,), (0,)), PageCopy(CopyKind.BACK, 0, (4,), (0,))]
    )
    assert torch.equal(page(data[0], 0, 2), page(before, 0, 1))
    assert torch.equal(page(data[0], 0, 4), page(before, 0, 3))


def test_what_is_swapped_out_stays_when_its_page_is_written() -> None:
    data = slabs()
    before = page(data[1], 1, 6).clone()
    area = SwapArea(LAYOUT, data, 2)
    area.run([PageCopy(CopyKind.OUT, 1, (6,), (1,))])
    page(data[1], 1, 6).fill_(255)
    area.run([PageCopy(CopyKind.BACK, 1, (6,), (1,))])
    assert torch.equal(page(data[1], 1, 6), before)


def test_sizes_are_checked() -> None:
    data = slabs()
    assert SwapArea(LAYOUT, data, 3).size_bytes == 3 * sum(group.page_bytes for group in GROUPS)
    with pytest.raises(ValueError, match="units is 0"):
        SwapArea(LAYOUT, data, 0)
    with pytest.raises(ValueError, match="1 slabs and 2 KV groups"):
        SwapArea(LAYOUT, data[:1], 1)
    with pytest.raises(ValueError, match="range of bytes in pages of 192"):
        SwapArea(LAYOUT, [data[0][1:], data[1]], 1)
    with pytest.raises(MemoryError, match="host pages"):
        SwapArea(LAYOUT, data, 1 << 45)
    with pytest.raises(ValueError, match="pairwise"):
        PageCopy(CopyKind.OUT, 0, (1, 2), (0,))

"""The host area that KV pages are swapped out to: allocated once, pinned where the pages are on a CUDA device."""

from collections.abc import Iterable, Sequence

import torch

from engine.layout import Layout
from engine.page_copy import CopyKind, PageCopy


class SwapArea:
    """`units` host pages for each KV group of `layout`; `slabs`: the bytes of the groups' slabs, uint8 [pages x page_bytes].

    Raises ValueError for sizes that do not fit each other, MemoryError when the host does not have that much.
    Owned by the thread that runs the steps.
    """

    def __init__(self, layout: Layout, slabs: Sequence[torch.Tensor], units: int) -> None:
        if units < 1:
            raise ValueError(f"units is {units}; a swap area has at least 1 host page")
        if len(slabs) != len(layout.groups):
            raise ValueError(f"{len(slabs)} slabs and {len(layout.groups)} KV groups; give one slab for each group")
        for slab, group in zip(slabs, layout.groups, strict=True):
            if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.numel() % group.page_bytes:
                raise ValueError(f"a slab must be one range of bytes in pages of {group.page_bytes}")
        self.units = units
        self._pages = tuple(slab.view(-1, group.page_bytes) for slab, group in zip(slabs, layout.groups, strict=True))
        self._host = tuple(_host_pages(units, pages) for pages in self._pages)

    @property
    def size_bytes(self) -> int:
        """Bytes of the area, all groups."""
        return sum(host.numel() for host in self._host)

    def run(self, copies: Iterable[PageCopy]) -> None:
        """Run copies in order; on return every byte has left its source.

        The wait matters: a page that was swapped out may be granted to a writer of another process, which no stream orders.
        """
        cuda = False
        for copy in copies:
            pages, host = self._pages[copy.group], self._host[copy.group]
            cuda = cuda or pages.is_cuda
            for page, host_page in zip(copy.pages, copy.host_pages, strict=True):
                if copy.kind is CopyKind.OUT:
                    host[host_page].copy_(pages[page], non_blocking=True)
                else:
                    pages[page].copy_(host[host_page], non_blocking=True)
        if cuda:
            torch.cuda.current_stream().synchronize()


def _host_pages(units: int, pages: torch.Tensor) -> torch.Tensor:
    """uint8 [units, page_bytes], every byte written once so that no swap pays for a page fault."""
    try:
        host = torch.empty(units, pages.shape[1], dtype=torch.uint8, pin_memory=pages.is_cuda)
    except RuntimeError as error:
        raise MemoryError(f"cannot allocate {units} host pages of {pages.shape[1]} bytes: {error}") from error
    return host.zero_()

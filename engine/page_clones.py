"""Clones KV pages inside their slabs."""

from collections.abc import Iterable, Sequence

import torch

from engine.layout import Layout
from engine.page_copy import PageClone


class PageCloner:
    """`slabs`: the bytes of the groups' slabs, uint8 [pages x page_bytes]. Owned by the thread that runs the steps.

    Raises ValueError when there is not one slab for each group.
    """

    def __init__(self, layout: Layout, slabs: Sequence[torch.Tensor]) -> None:
        if len(slabs) != len(layout.groups):
            raise ValueError(f"{len(slabs)} slabs and {len(layout.groups)} KV groups; give one slab for each group")
        self._pages = tuple(slab.view(-1, group.page_bytes) for slab, group in zip(slabs, layout.groups, strict=True))

    def run(self, clones: Iterable[PageClone]) -> None:
        """Run clones in order; on return every byte has left its source, which may be granted to another process by then."""
        cuda = False
        for clone in clones:
            pages = self._pages[clone.group]
            cuda = cuda or pages.is_cuda
            for source, target in zip(clone.sources, clone.targets, strict=True):
                pages[target].copy_(pages[source], non_blocking=True)
        if cuda:
            torch.cuda.current_stream().synchronize()

"""What a member's hand-overs need to know of its engine's memory."""

from dataclasses import replace

from engine.layout import Layout
from engine.quantisation import WeightQuantisation
from engine.slab import SlabMemory
from kv_transfer.offer import LayoutView, Slab


def layout_view(layout: Layout) -> LayoutView:
    """The layout as both ends of a hand-over compare it."""
    groups = layout.groups
    page_tokens, windows = tuple(group.page_tokens for group in groups), tuple(group.window for group in groups)
    kinds = tuple((replace(layout, weight_quantisation=kind.value).fingerprint, kind.value) for kind in WeightQuantisation)
    return LayoutView(layout.fingerprint, page_tokens, windows, kinds)


def registered(slab: SlabMemory) -> Slab:
    """Memory of the engine as a transport addresses it."""
    return Slab(slab.address, slab.size_bytes, slab.unit_bytes)

"""What a member's hand-overs need to know of its engine's memory."""

from engine.layout import Layout
from engine.slab import SlabMemory
from kv_transfer.offer import LayoutView, Slab


def layout_view(layout: Layout) -> LayoutView:
    """The layout as both ends of a hand-over compare it."""
    groups = layout.groups
    return LayoutView(layout.fingerprint, tuple(group.page_tokens for group in groups), tuple(group.window for group in groups))


def registered(slab: SlabMemory) -> Slab:
    """Memory of the engine as a transport addresses it."""
    return Slab(slab.address, slab.size_bytes, slab.unit_bytes)

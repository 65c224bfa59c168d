"""Copies between KV pages and host pages, and of KV pages, as values. Pure."""

from dataclasses import dataclass
from enum import Enum


class CopyKind(Enum):
    """Which way a copy goes."""

    OUT = "out"
    """From pages to the host."""
    BACK = "back"
    """From the host to pages."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Whole pages of one KV group, pairwise: `pages[i]` is a page of the group's slab, `host_pages[i]` one of its host area.

    Copies are run in the order in which they were made, before the next step: a page or a host page may be in several.
    """

    kind: CopyKind
    group: int
    pages: tuple[int, ...]
    host_pages: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pages) != len(self.host_pages):
            raise ValueError(f"{len(self.pages)} pages and {len(self.host_pages)} host pages; a copy is pairwise")


@dataclass(frozen=True, slots=True)
class PageClone:
    """Whole pages of one KV group, pairwise: what is in `sources[i]` comes into `targets[i]`, before anything else does.

    Of pages that others read too, so that their holder can write behind what they share.
    """

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise ValueError(f"{len(self.sources)} sources and {len(self.targets)} targets; a clone is pairwise")

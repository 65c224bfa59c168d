"""What one seat or one open grant holds of a decode member's memory: values. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.layout import GroupLayout


class NoPages(Exception):
    """The promise can not be made now. Nothing was changed. `wanted`, `available`: pages of the shortest group."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages are needed and {available} are neither used nor promised")
        self.wanted = wanted
        self.available = available


class NoLandingRow(Exception):
    """Every landing row is held. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a seat's pages are to hold, of which a front may be here. most_tokens: no more is taken from the cache. received: what
    is not here is sent, not computed."""

    salt: bytes
    token_ids: Sequence[int]
    most_tokens: int
    received: bool = False


@dataclass(slots=True)
class Holding:
    """Pages of one seat, one table per KV group; a table is only ever appended to.

    promised: pages not taken yet, per group; `tokens`: what they were promised for. gone: null pages at the front of each table,
    in place of those that left a window.

    salt: the tenant's; empty: the seat has nothing to do with the prefix cache. keys: names of its full pages, as far as they
    were made. indexed: so many pages at the front can be found by their keys, those that it needs not left out. found_tokens: so
    many of its tokens could be computed on from when its pages were promised. granted_bytes: pages that were granted for it.
    """

    holder: str
    tables: tuple[list[int], ...]
    promised: list[int]
    tokens: int
    gone: list[int]
    salt: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    indexed: int = 0
    found_tokens: int = 0
    granted_bytes: int = 0

    def live(self, group: int) -> int:
        """Pages held in a group."""
        return len(self.tables[group]) - self.gone[group]

    @property
    def pages(self) -> int:
        """Pages held, all groups."""
        return sum(len(table) for table in self.tables) - sum(self.gone)


@dataclass(slots=True)
class Held:
    """What one open grant keeps away from everybody else until its writer has stopped."""

    landing_row: int | None
    pages: int
    quarantined: bool = field(default=False, init=False)


def shareable(groups: Sequence[GroupLayout], tokens: int) -> list[int]:
    """Full pages of so many tokens that another seat can read where they are, per group. None behind a window: they leave it for
    each seat at a time of its own, and a page that another one still holds could not be promised again."""
    return [0 if group.window is not None else tokens // group.page_tokens for group in groups]

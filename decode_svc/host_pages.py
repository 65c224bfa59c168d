"""Who holds which page of the host area that preempted seats are swapped out to. Pure; the bytes are in engine.swap."""

from collections.abc import Sequence

from engine.page_copy import CopyKind, PageCopy


class HostPages:
    """`units` host pages for each of `groups` KV groups; 0 units is no area. A holder holds one set at a time."""

    def __init__(self, groups: int, units: int) -> None:
        self.units = units
        self._free = tuple(list(range(units - 1, -1, -1)) for _ in range(groups))
        self._held: dict[str, tuple[tuple[int, ...], ...]] = {}

    @property
    def total(self) -> int:
        """Host pages, all groups."""
        return self.units * len(self._free)

    @property
    def used(self) -> int:
        """Host pages that are held, all groups."""
        return self.total - sum(len(free) for free in self._free)

    def held(self, holder: str) -> int:
        """Host pages of a holder, all groups; 0 when it is not swapped out."""
        return sum(len(pages) for pages in self._held.get(holder, ()))

    def swap_out(self, holder: str, tables: Sequence[Sequence[int]]) -> list[PageCopy] | None:
        """Room for the pages of `tables`, one table per group, and the copies that fill it; None when there is not enough."""
        assert holder not in self._held, f"{holder} is swapped out twice"
        if any(len(table) > len(free) for table, free in zip(tables, self._free, strict=True)):
            return None
        self._held[holder] = tuple(tuple(free.pop() for _ in table) for table, free in zip(tables, self._free, strict=True))
        return self._copies(CopyKind.OUT, holder, tables)

    def swap_back(self, holder: str, tables: Sequence[Sequence[int]]) -> list[PageCopy]:
        """The copies that bring a holder's content back into the first pages of `tables`. Its host pages are free then."""
        copies = self._copies(CopyKind.BACK, holder, tables)
        self.release(holder)
        return copies

    def release(self, holder: str) -> None:
        """Give back what a holder holds, if anything."""
        for free, pages in zip(self._free, self._held.pop(holder, ()), strict=False):
            free.extend(reversed(pages))

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        faults = []
        for group, free in enumerate(self._free):
            held = [page for sets in self._held.values() for page in sets[group]]
            if sorted([*free, *held]) != list(range(self.units)):
                faults.append(f"group {group}: {len(free)} host pages are free and {len(held)} held, there are {self.units}")
        return faults

    def _copies(self, kind: CopyKind, holder: str, tables: Sequence[Sequence[int]]) -> list[PageCopy]:
        pairs = zip(tables, self._held[holder], strict=True)
        return [PageCopy(kind, group, tuple(table[: len(host)]), host) for group, (table, host) in enumerate(pairs) if host]

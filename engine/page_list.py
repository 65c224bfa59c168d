"""Lists of pages, such as the free ones: doubly linked through arrays, so that any page leaves in constant time. Pure."""

from array import array
from collections.abc import Iterator
from typing import Self


class FreeList:
    """Page ids, those first that were put in least recently.

    Page 0 is never in the list: its two cells are the list's two ends, which is why no case for an empty list or for
    an end is needed anywhere. A page that is not in the list points at itself. Eight bytes a page.
    """

    __slots__ = ("_after", "_before", "_length")

    def __init__(self, total_pages: int) -> None:
        """All pages 1..total_pages-1, ascending."""
        last = total_pages - 1
        self._after: array[int] = array("i", [*range(1, total_pages), 0])
        self._before: array[int] = array("i", [last, *range(last)])
        self._length = last

    @classmethod
    def empty(cls, total_pages: int) -> Self:
        """No page of 1..total_pages-1 is in it yet."""
        made = cls(total_pages)
        made._after = array("i", range(total_pages))
        made._before = array("i", range(total_pages))
        made._length = 0
        return made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Walks at most as many steps as there can be pages, so that a broken chain ends the walk too."""
        page = self._after[0]
        for _ in range(len(self._after)):
            if page == 0:
                return
            yield page
            page = self._after[page]

    def append(self, page: int) -> None:
        """Put a page that is not in the list at the end that is handed out last."""
        last = self._before[0]
        self._after[last] = page
        self._before[page] = last
        self._after[page] = 0
        self._before[0] = page
        self._length += 1

    def remove(self, page: int) -> None:
        """Take out a page that is in the list, wherever it stands."""
        before, after = self._before[page], self._after[page]
        self._after[before] = after
        self._before[after] = before
        self._after[page] = self._before[page] = page
        self._length -= 1

    def oldest(self) -> int:
        """The least recently freed page; 0 when the list is empty."""
        return self._after[0]

    def take(self, count: int, after: int) -> list[int]:
        """Take out `count` pages in ascending stretches, the first from behind page `after` when that one is here, else from the
        oldest page and its neighbours, upwards first. The caller knows that there are enough."""
        pages: list[int] = []
        start = after + 1 if after and self._has(after + 1) else 0
        while len(pages) < count:
            start = start or self.oldest()
            upwards = self._run(range(start, len(self._after)), count - len(pages))
            downwards = self._run(range(start - 1, 0, -1), count - len(pages) - len(upwards))
            pages += reversed(downwards)
            pages += upwards
            start = 0
        return pages

    def _run(self, ids: range, most: int) -> list[int]:
        run: list[int] = []
        for page in ids:
            if len(run) == most or not self._has(page):
                break
            self.remove(page)
            run.append(page)
        return run

    def _has(self, page: int) -> bool:
        return page < len(self._after) and self._after[page] != page

    def broken_links(self) -> list[int]:
        """Pages in the chain whose neighbour does not point back; empty when the chain is whole."""
        return [page for page in (0, *self) if self._before[self._after[page]] != page]

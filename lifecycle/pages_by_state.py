"""Pages of KV by what they are to their member, as counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagesByState:
    """Every page of a member is in one of these states; counts of pages.

    free: nobody has it. owned: of a sequence. cached: nobody's, and found again by its content. granted: a writer may fill it.
    quarantined: taken back from a writer that is not known to have stopped. pinned: read by a transfer after its owner let go.
    """

    free: int = 0
    owned: int = 0
    cached: int = 0
    granted: int = 0
    quarantined: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.free + self.owned + self.cached + self.granted + self.quarantined + self.pinned


#: A member that has told of none.
NO_PAGES = PagesByState()

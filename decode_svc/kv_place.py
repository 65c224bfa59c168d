"""Where the KV of a seat lives: a machine of its own beside the seat's state. Pure."""

from enum import Enum


class KvPlace(Enum):
    """Where what a seat has computed or received is."""

    NONE = "none"  # nowhere yet: a writer fills its grant
    RESIDENT = "resident"  # in pages
    SWAPPED = "swapped"  # preempted: in host pages
    DROPPED = "dropped"  # preempted: nowhere, to be recomputed


PLACE_EDGES: dict[KvPlace, frozenset[KvPlace]] = {
    KvPlace.NONE: frozenset({KvPlace.RESIDENT}),
    KvPlace.RESIDENT: frozenset({KvPlace.SWAPPED, KvPlace.DROPPED}),
    KvPlace.SWAPPED: frozenset({KvPlace.RESIDENT}),
    KvPlace.DROPPED: frozenset({KvPlace.RESIDENT}),
}

#: Places of a preempted seat.
AWAY = frozenset({KvPlace.SWAPPED, KvPlace.DROPPED})


class IllegalKvMove(Exception):
    """An error of programming: a move that the table has no edge for. Nothing was changed."""

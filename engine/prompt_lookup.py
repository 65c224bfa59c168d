"""Drafts out of the text itself: what followed the last tokens where they stood before. Pure.

Places are found as in Lempel and Ziv's compression: a table with the newest place of each hash of the last few tokens, and for
each place the one before it with the same hash. Adding a token and asking for drafts take constant time; memory is a table of
fixed size and eight bytes for each token, of which there are no more than the context has.
"""

from array import array
from dataclasses import dataclass

#: Hashes that are told apart. A power of two.
HASHES = 1 << 12
#: Places that are looked at for one draft.
CHAIN_PLACES = 16

_NONE = -1


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """How many of the last tokens must have stood together before: at least `shortest`; more than `longest` are not compared."""

    shortest: int = 2
    longest: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"lookup_shortest is {self.shortest}, must be 1 to lookup_longest, which is {self.longest}")


class PromptLookup:
    """The searchable text of one sequence: its prompt, then its output."""

    __slots__ = ("_before", "_limits", "_newest", "_tokens")

    def __init__(self, limits: LookupLimits) -> None:
        self._limits = limits
        self._tokens = array("i")
        self._before = array("i")  # one shorter: what is found is followed by a token
        self._newest = array("i", [_NONE]) * HASHES

    @property
    def length(self) -> int:
        """Tokens added so far."""
        return len(self._tokens)

    def add(self, token_ids: tuple[int, ...]) -> None:
        """The text goes on with these."""
        tokens, before, newest = self._tokens, self._before, self._newest
        first = len(before)
        tokens.extend(token_ids)
        back = self._limits.shortest - 1
        for place in range(first, len(tokens) - 1):
            if place < back:
                before.append(_NONE)
                continue
            hashed = hash(tuple(tokens[place - back : place + 1])) % HASHES
            before.append(newest[hashed])
            newest[hashed] = place

    def propose(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may come next; none when the last tokens did not stand together before.

        The longest match counts, of equally long ones the newest. One that reaches up to the end goes round.
        """
        found = self._find() if most > 0 else _NONE
        if found == _NONE:
            return ()
        drafts = self._tokens[found + 1 : found + 1 + most].tolist()
        for place in range(most - len(drafts)):
            drafts.append(drafts[place])
        return tuple(drafts)

    def _find(self) -> int:
        """The last place of the best match."""
        tokens, limits = self._tokens, self._limits
        end = len(tokens) - 1
        if end < limits.shortest:
            return _NONE
        best, best_length = _NONE, limits.shortest - 1
        place = self._newest[hash(tuple(tokens[end - limits.shortest + 1 :])) % HASHES]
        for _ in range(CHAIN_PLACES):
            if place == _NONE:
                break
            length = self._match(place, end)
            if length > best_length:
                best, best_length = place, length
                if length == limits.longest:
                    break
            place = self._before[place]
        return best

    def _match(self, place: int, end: int) -> int:
        """How many tokens up to `place` are those up to `end`, as far as it counts."""
        tokens, length = self._tokens, 0
        most = min(self._limits.longest, place + 1)
        while length < most and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

"""Which members said that they have which prefixes: a hint. Pure.

A hint that is wrong, old or a lie costs time: the member that is asked looks for itself. So hints are bounded, kept as 64 bits of
a key, and dropped without asking anybody.

A member tells the last pages of prefixes that it can compute on from. Behind a window it may have lost what a shorter one needs,
so the longest is looked for from its end.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from router.member_facts import M


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """What a member told of its pages, as `lifecycle.prefix_keys.short`. `anew`: what it told before is void."""

    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()
    anew: bool = False


class PrefixHints(Generic[M]):
    """The hints of one pool. `most`: of each member; of more, those that were told longest ago are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[M, dict[int, None]] = {}
        self._holders: dict[int, tuple[M, ...]] = {}

    def __len__(self) -> int:
        """Hints of all members."""
        return sum(len(known) for known in self._of.values())

    def told(self, member: M, news: PrefixNews) -> None:
        """A member told what it has and has not any more."""
        if news.anew:
            self.drop(member)
        known = self._of.setdefault(member, {})
        for key in news.evicted:
            self._forget(member, known, key)
        for key in news.stored:
            if key not in known:
                known[key] = None
                self._holders[key] = (*self._holders.get(key, ()), member)
                if len(known) > self._most:
                    self._forget(member, known, next(iter(known)))

    def drop(self, member: M) -> None:
        """A member is gone, or begins anew."""
        known = self._of.pop(member, {})
        for key in list(known):
            self._forget(member, known, key)

    def refute(self, member: M, keys: Iterable[int]) -> None:
        """A member has not what was thought: nothing of this prefix is held of it until it tells it again."""
        known = self._of.get(member, {})
        for key in keys:
            self._forget(member, known, key)

    def pages(self, member: M, keys: Sequence[int]) -> int:
        """Pages of a prefix that a member is thought to have. Linear in `keys`."""
        known = self._of.get(member)
        return _longest(known, keys) if known else 0

    def longest(self, keys: Sequence[int]) -> int:
        """Pages of a prefix that anybody is thought to have. Linear in `keys`."""
        return _longest(self._holders, keys)

    def holders(self, keys: Sequence[int]) -> tuple[M, ...]:
        """The members that are thought to have the longest front of a prefix that anybody has; none when nobody has any."""
        count = self.longest(keys)
        return self._holders[keys[count - 1]] if count else ()

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        pairs = {(member, key) for member, known in self._of.items() for key in known}
        held = {(member, key) for key, members in self._holders.items() for member in members}
        faults = [] if pairs == held else [f"{len(pairs)} hints are known by member and {len(held)} by prefix"]
        return faults + [f"a member has {len(k)} hints, above {self._most}" for k in self._of.values() if len(k) > self._most]

    def _forget(self, member: M, known: dict[int, None], key: int) -> None:
        if key not in known:
            return
        del known[key]
        left = tuple(one for one in self._holders[key] if one is not member)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _longest(known: Container[int], keys: Sequence[int]) -> int:
    for count in range(len(keys), 0, -1):
        if keys[count - 1] in known:
            return count
    return 0

"""Which prefixes can be computed on from, where pages behind windows go by themselves: for the news of a member. Pure.

A prefix is named by the key of its last page. It can be used while groups without a window have all its pages and each windowed
group those that the next token sees; so one page that goes may spoil some that follow it, never one before it.
"""

from collections.abc import Iterator, Sequence

from engine.layout import GroupLayout, pages_for
from engine.pages import PagePool
from engine.prefix_index import CHANGES_MIN, KeyChanges, PrefixChanges


class UsablePrefixes:
    """What was told is usable whenever changes are taken. A prefix that became whole again is told when it is next used."""

    def __init__(self, pools: Sequence[PagePool], groups: Sequence[GroupLayout]) -> None:
        self._pools = tuple(pools)
        self._groups = tuple(groups)
        self._told: dict[bytes, None] = {}
        self._changes = KeyChanges(max(CHANGES_MIN, *(pool.usable_pages for pool in pools)))
        #: Of the keys that some group has: the key of the page before, and of those behind it.
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}

    def remembered(self, keys: Sequence[bytes], first: int) -> None:
        """Pages of this prefix were indexed, from number `first` on. `keys`: of all its pages."""
        if not first or keys[first - 1] not in self._told:
            first = 0
        # Of what was told before everything is here that what follows it sees.
        runs = [first] * len(self._pools)
        parent = keys[first - 1] if first else b""
        for number, key in enumerate(keys[first:], first):
            for group, pool in enumerate(self._pools):
                runs[group] = runs[group] + 1 if pool.index.page(key) is not None else 0
            if any(runs) and key not in self._parents:
                self._parents[key] = parent
                self._children.setdefault(parent, {})[key] = None
            parent = key
            if key not in self._told and self._sees(number + 1, runs):
                self._told[key] = None
                self._changes.note(key, stored=True)

    def take_changes(self) -> PrefixChanges:
        """What became usable since the last call, and what is not any more."""
        for pool, group in zip(self._pools, self._groups, strict=True):
            changes = pool.index.take_changes()
            for key in [*self._told] if changes.anew else changes.evicted:
                self._spoil(key, pool, group)
            for key in [*self._parents] if changes.anew else changes.evicted:
                if all(each.index.page(key) is None for each in self._pools):
                    self._unlink(key)
        return self._changes.take(self._told)

    def check(self) -> list[str]:
        """Sentences about what does not add up; call it when changes were taken."""
        lost = sum(all(pool.index.page(key) is None for pool in self._pools) for key in {*self._told, *self._parents})
        pairs = {(parent, child) for parent, children in self._children.items() for child in children}
        faults = [f"{lost} prefixes are noted of which no page is here"] if lost else []
        if pairs != {(parent, child) for child, parent in self._parents.items()}:
            faults.append("what follows a page and what goes before it do not match")
        return faults

    def _sees(self, pages: int, runs: Sequence[int]) -> bool:
        """runs: how many pages without a gap each group has up to there."""
        seen = zip(runs, self._groups, strict=True)
        return all(run >= pages - group.first_page(pages * group.page_tokens) for run, group in seen)

    def _spoil(self, key: bytes, pool: PagePool, group: GroupLayout) -> None:
        """A group has lost a page: no prefix can be used any more whose next token would see it."""
        level, depth = [key], 0
        while level and (group.window is None or depth < pages_for(group.window - 1, group.page_tokens)):
            for one in level:
                if one in self._told:
                    del self._told[one]
                    self._changes.note(one, stored=False)
            # Behind another page that is not there everything is spoiled already.
            level = [child for child in self._following(level) if pool.index.page(child) is not None]
            depth += 1

    def _following(self, level: Sequence[bytes]) -> Iterator[bytes]:
        for key in level:
            yield from self._children.get(key, ())

    def _unlink(self, key: bytes) -> None:
        parent = self._parents.pop(key, None)
        if parent is None:
            return
        children = self._children[parent]
        del children[key]
        if not children:
            del self._children[parent]

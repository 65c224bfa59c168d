"""Seats that share the front of a prompt: what each reads is what it wrote, and nothing is lost, in any order of events."""

import random
from collections.abc import Iterable

import pytest

from decode_svc.branching import branch
from decode_svc.holding import NoPages
from decode_svc.memory import DecodeMemory, Holding
from engine.layout import GroupKind, GroupLayout, Layout
from engine.page_copy import PageClone

PAGE_TOKENS = 4


def memory_of(total_pages: int, window: int | None = None) -> DecodeMemory:
    groups = [GroupLayout(GroupKind.FULL, 1, 1, 1, PAGE_TOKENS, "float32")]
    if window is not None:
        groups.append(GroupLayout(GroupKind.SLIDING, 1, 1, 1, PAGE_TOKENS, "float32", window))
    return DecodeMemory(Layout("snapshot", tuple(groups)), total_pages, 1)


class Contents:
    """What is in the pages, and what each seat has written: a position of a seat that another one overwrites shows."""

    def __init__(self, memory: DecodeMemory) -> None:
        self.memory = memory
        self.pages: list[dict[int, list[str]]] = [{} for _ in memory.groups]
        self.written: dict[str, list[str]] = {}

    def write(self, holding: Holding, values: Iterable[str]) -> None:
        for value in values:
            position = len(self.written.setdefault(holding.holder, []))
            for table, pages in zip(holding.tables, self.pages, strict=True):
                page = pages.setdefault(table[position // PAGE_TOKENS], [""] * PAGE_TOKENS)
                page[position % PAGE_TOKENS] = value
            self.written[holding.holder].append(value)

    def clone(self, clones: Iterable[PageClone]) -> None:
        for one in clones:
            for source, target in zip(one.sources, one.targets, strict=True):
                self.pages[one.group][target] = list(self.pages[one.group].get(source, [""] * PAGE_TOKENS))

    def check(self, holding: Holding) -> None:
        written = self.written.get(holding.holder, [])
        for table, gone, pages in zip(holding.tables, holding.gone, self.pages, strict=True):
            for position in range(gone * PAGE_TOKENS, len(written)):
                page = pages[table[position // PAGE_TOKENS]]
                assert page[position % PAGE_TOKENS] == written[position], f"{holding.holder} at {position}"


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 8, 11])
def test_full_pages_are_shared_and_the_partial_one_is_cloned(prompt_tokens: int) -> None:
    memory = memory_of(30)
    parent = memory.promise("a", 20)
    memory.take(parent, prompt_tokens)
    child = memory.promise("b", 20, shared_tokens=prompt_tokens)
    assert child.promised == [5 - prompt_tokens // PAGE_TOKENS]
    clones = branch(memory, child, parent, prompt_tokens)
    shared, partial = prompt_tokens // PAGE_TOKENS, prompt_tokens % PAGE_TOKENS > 0
    assert child.tables[0][:shared] == parent.tables[0][:shared]
    assert [len(one.sources) for one in clones] == [1] * partial
    assert set(child.tables[0][shared:]).isdisjoint(parent.tables[0])
    assert memory.check([]) == []
    memory.release(parent)
    memory.take(child, 20)
    assert memory.check([]) == []
    memory.release(child)
    assert memory.counts().free == memory.counts().total


def test_behind_a_window_everything_that_is_still_seen_is_cloned() -> None:
    memory = memory_of(30, window=6)
    parent = memory.promise("a", 24)
    memory.take(parent, 15)
    memory.slide(parent, 15, computed=False)
    child = memory.promise("b", 24, shared_tokens=15)
    clones = {one.group: one for one in branch(memory, child, parent, 15)}
    assert child.tables[0][:3] == parent.tables[0][:3]
    assert child.gone == parent.gone
    assert set(child.tables[1][child.gone[1] :]).isdisjoint(parent.tables[1])
    assert len(clones[1].sources) == len(parent.tables[1]) - parent.gone[1]
    assert memory.check([]) == []


@pytest.mark.parametrize("window", [None, 6])
def test_ten_thousand_operations(window: int | None) -> None:
    """Open, branch, grow, preempt, come back and release in random order; nobody ever sees what another one wrote."""
    rng = random.Random(f"branches {window}")
    memory = memory_of(60, window)
    contents, live, vacated = Contents(memory), dict[str, Holding](), set[str]()
    numbers = iter(range(10**6))
    for _ in range(10_000):
        chosen = rng.choice(sorted(live)) if live else ""
        written = contents.written.get(chosen, [])
        match rng.randrange(6) if live else 0:
            case 0 | 1 if len(live) < 8:
                open_family(memory, contents, live, rng, [f"s{next(numbers)}" for _ in range(rng.randint(1, 4))])
            case 2 | 3 if chosen not in vacated and len(written) < live[chosen].tokens:
                memory.take(live[chosen], len(written) + 1)
                contents.write(live[chosen], [f"{chosen}:{len(written)}"])
                memory.slide(live[chosen], len(written) + 1, computed=False)
            case 4 if chosen in vacated:
                come_back(memory, contents, live[chosen], vacated)
            case 4:
                memory.vacate(live[chosen])
                vacated.add(chosen)
            case _ if chosen:
                memory.release(live.pop(chosen))
                vacated.discard(chosen)
        assert memory.check([]) == []
        for name, holding in live.items():
            if name not in vacated:
                contents.check(holding)
    for holding in live.values():
        memory.release(holding)
    assert memory.check([]) == []
    assert memory.counts().free == memory.counts().total


def open_family(memory: DecodeMemory, contents: Contents, live: dict[str, Holding], rng: random.Random, names: list[str]) -> None:
    prompt, tokens = rng.randint(1, 14), rng.randint(14, 24)
    made: list[Holding] = []
    try:
        made.append(memory.promise(names[0], tokens))
        made += [memory.promise(name, tokens, shared_tokens=prompt) for name in names[1:]]
    except NoPages:
        for holding in made:
            memory.release(holding)
        return
    leader = made[0]
    memory.take(leader, prompt)
    contents.write(leader, [f"{names[0]}:{position}" for position in range(prompt)])
    for holding in made[1:]:
        contents.clone(branch(memory, holding, leader, prompt))
        contents.written[holding.holder] = list(contents.written[leader.holder])
    for holding in made:
        memory.slide(holding, prompt, computed=False)
    live.update((holding.holder, holding) for holding in made)


def come_back(memory: DecodeMemory, contents: Contents, holding: Holding, vacated: set[str]) -> None:
    """All that it had is computed again, into pages of its own."""
    try:
        memory.refill(holding, holding.tokens, computed=True)
    except NoPages:
        return
    written = contents.written.pop(holding.holder)
    vacated.discard(holding.holder)
    for end, value in enumerate(written, start=1):
        memory.take(holding, end)
        contents.write(holding, [value])
        memory.slide(holding, end, computed=True)

"""What members tell of their prefix caches and what routers remember of it: coalesced, bounded, told anew after gaps."""

import random
from dataclasses import dataclass, field

from engine.prefix_index import PrefixChanges
from lifecycle.prefix_keys import short
from member.prefix_feed import MESSAGE_HASHES_MAX, PrefixFeed
from router.member_facts import MemberInfo, MemberLoad, Role
from router.nearness import nearness
from router.prefix_hints import PrefixHints, PrefixNews


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def changes(stored: range | tuple[int, ...] = (), evicted: range | tuple[int, ...] = (), anew: bool = False) -> PrefixChanges:
    return PrefixChanges(tuple(map(key, stored)), tuple(map(key, evicted)), anew)


@dataclass(eq=False)
class Member:
    info: MemberInfo = field(default_factory=lambda: MemberInfo("m", "i", "a", Role.DECODE, "s", 16, 10, 10, 1, 0, True))
    load: MemberLoad = field(default_factory=MemberLoad)
    seen_at: float = 0.0


class Watcher:
    """A router: what it would remember, and the version that it has seen."""

    def __init__(self, most: int = 100_000) -> None:
        self.hints: PrefixHints[Member] = PrefixHints(most)
        self.member = Member()
        self.seen: int | None = None
        self.messages = 0

    def read(self, feed: PrefixFeed) -> None:
        told, self.seen = feed.since(self.seen), feed.version
        self.messages += len(told)
        for one in told:
            self.hints.told(self.member, PrefixNews(one.stored, one.evicted, one.anew))

    @property
    def knows(self) -> set[int]:
        assert self.hints.check() == []
        return set(self.hints._of.get(self.member, ()))


def test_whoever_comes_late_is_told_everything_and_then_only_what_changes() -> None:
    feed, late = PrefixFeed(), Watcher()
    feed.put(changes(range(5)))
    feed.put(changes((), (0, 1)))
    late.read(feed)
    assert late.knows == {2, 3, 4} and late.messages == 1
    late.read(feed)
    assert late.messages == 1
    feed.put(changes((7,), (2,)))
    feed.put(changes((8,), (7,)))
    late.read(feed)
    assert late.knows == {3, 4, 8}


def test_a_page_that_came_and_went_between_two_looks_is_only_said_to_be_gone() -> None:
    feed, watcher = PrefixFeed(), Watcher()
    watcher.read(feed)
    feed.put(changes((7,)))
    feed.put(changes((), (7,)))
    assert [(one.stored, one.evicted) for one in feed.since(watcher.seen)] == [((), (7,))]


def test_large_news_come_in_parts() -> None:
    feed, watcher = PrefixFeed(), Watcher()
    feed.put(changes(range(2 * MESSAGE_HASHES_MAX + 1)))
    told = feed.since(None)
    assert [len(one.stored) for one in told] == [MESSAGE_HASHES_MAX, MESSAGE_HASHES_MAX, 1]
    assert [one.anew for one in told] == [True, False, False]
    watcher.read(feed)
    assert len(watcher.knows) == 2 * MESSAGE_HASHES_MAX + 1


def test_whoever_is_too_far_behind_is_told_everything() -> None:
    feed, watcher, rng, here = PrefixFeed(told_max=20, kept_changes_max=10), Watcher(), random.Random(1), set[int]()
    for number in range(300):
        stored = tuple(n for n in range(3 * number, 3 * number + rng.randrange(4)))
        evicted = tuple(rng.sample(sorted(here), min(len(here), rng.randrange(4))))
        feed.put(changes(stored, evicted))
        here = (here - set(evicted)) | set(stored)
        here = set(sorted(here)[-20:]) if len(here) > 20 else here
        assert feed._kept <= 10 and len(feed._here) <= 20
        if rng.random() < 0.3:
            watcher.read(feed)
            assert here & set(feed._here) <= watcher.knows


def test_an_index_that_lost_count_tells_anew() -> None:
    feed, watcher = PrefixFeed(), Watcher()
    feed.put(changes(range(5)))
    watcher.read(feed)
    feed.put(changes((7, 8), anew=True))
    watcher.read(feed)
    assert watcher.knows == {7, 8}


def test_hints_are_bounded_for_each_member_and_the_oldest_go() -> None:
    hints: PrefixHints[Member] = PrefixHints(3)
    one, other = Member(), Member()
    hints.told(one, PrefixNews(stored=range(5)))
    hints.told(other, PrefixNews(stored=(4,)))
    assert [hints.pages(one, (n,)) for n in range(5)] == [0, 0, 1, 1, 1] and len(hints) == 4
    assert hints.holders((4,)) == (one, other) and hints.check() == []
    hints.drop(one)
    assert hints.holders((4,)) == (other,) and hints.check() == []
    hints.refute(other, (4,))
    assert hints.holders((4,)) == () and hints.check() == []


def test_the_longest_front_is_found() -> None:
    """Whatever a member claims, there is an answer; when it told true, it is the right one."""
    hints: PrefixHints[Member] = PrefixHints(1000)
    deep, shallow, liar = Member(), Member(), Member()
    keys = range(100)
    hints.told(deep, PrefixNews(stored=range(60)))
    hints.told(shallow, PrefixNews(stored=range(10)))
    assert hints.holders(keys) == (deep,)
    assert [hints.pages(member, keys) for member in (deep, shallow, liar)] == [60, 10, 0]
    hints.told(liar, PrefixNews(stored=(*range(50, 100, 2), 12_345)))
    assert 0 <= hints.pages(liar, keys) <= 100 and hints.holders(keys)


def test_behind_a_window_the_end_of_a_prefix_is_enough() -> None:
    """Of a long prompt a member can compute on from its end and from what it has left behind last, not from its beginning."""
    hints: PrefixHints[Member] = PrefixHints(1000)
    one, other = Member(), Member()
    hints.told(one, PrefixNews(stored=(6, 7, 8)))
    hints.told(other, PrefixNews(stored=(3, 4)))
    assert [hints.pages(one, range(count)) for count in (6, 7, 9, 20)] == [0, 7, 9, 9]
    near = nearness(hints, range(20), 4, {"one": one, "other": other}, {one: 0, other: 1}.get)
    assert (near.places, near.tokens("one"), near.tokens("other")) == ([0], 36, 20)
    hints.told(one, PrefixNews(evicted=(8,)))
    assert nearness(hints, range(20), 4, {"one": one}, {one: 0}.get).tokens("one") == 32


def test_short_keys_are_what_is_told() -> None:
    feed = PrefixFeed()
    feed.put(changes((5,)))
    assert feed.since(None)[0].stored == (short(key(5)),)

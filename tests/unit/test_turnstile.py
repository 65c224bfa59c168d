"""The turnstile: views of the pools that are kept must always be what they would be if made anew."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.growth.live_cases import Known, known
from lifecycle.adapters import Adapter
from lifecycle.record import AttemptKey
from router.budget import Budget, Limits, Resource, Scope
from router.member_facts import MemberLoad, Role
from router.pool_views import PoolViews
from router.queue import QueueFull, QueueLimits, Waiting, WaitTooLong
from router.refused import RETRY_AFTER_MAX_S
from router.turnstile import AdmissionSettings, Admitted, Place, Turnstile
from router.unseen import Sent, Unseen

STALE_AFTER_S = 3.0


class Pools:
    """Members that come, go, and tell news."""

    def __init__(self) -> None:
        self.members = {role: [self.make(role, number) for number in range(3)] for role in Role}

    @staticmethod
    def make(role: Role, number: int) -> Known:
        one = known(role, number, 40)
        one.info = replace(one.info, total_pages=40, max_sequences=8, max_queued_tokens=400)
        return one

    def usable(self, role: Role) -> list[Known]:
        return self.members[role]

    def stale_at(self, member: Known) -> float:
        return member.seen_at + STALE_AFTER_S


class Slow:
    """Counts as router.admission did before sums were kept: by looking at everything that holds a ticket."""

    def __init__(self) -> None:
        self.seated: dict[Admitted[Known], float] = {}
        self.accepted: dict[Admitted[Known], float] = {}
        self.committed: set[Admitted[Known]] = set()

    def decode(self, member: Known) -> tuple[int, int]:
        unseen = [one for one, at in self.seated.items() if one.decode is member and not 0.0 < at <= member.seen_at]
        return len(unseen), sum(one.demand.pages for one in unseen)

    def prefill(self, member: Known) -> int:
        mine = [(one, at) for one, at in self.accepted.items() if one.prefill is member and one not in self.committed]
        return sum(one.demand.prefill_tokens for one, at in mine if not 0.0 < at <= member.seen_at)


def compare(views: PoolViews[Known], slow: Slow, pools: Pools, now: float) -> None:
    views.refresh(now)
    for view, member in zip(views.decode.views, pools.members[Role.DECODE], strict=True):
        assert view.member == member.info.name and view.free_pages == member.load.free_pages
        assert (view.inflight_sequences, view.inflight_pages) == slow.decode(member)
        assert view.stale == (pools.stale_at(member) < now)
        assert view.draining or view.free_pages - view.inflight_pages <= views.room.pages
    for source, member in zip(views.prefill.views, pools.members[Role.PREFILL], strict=True):
        assert source.inflight_tokens == slow.prefill(member)
        assert source.stale == (pools.stale_at(member) < now)
        left = source.max_queued_tokens - source.waiting_tokens - source.inflight_tokens
        assert source.draining or views.room.tokens is None or left <= views.room.tokens


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_views_that_are_kept_are_what_a_walk_over_all_tickets_gives(seed: int) -> None:
    dice, pools, slow, now = random.Random(seed), Pools(), Slow(), 1.0
    gate = Turnstile(pools, AdmissionSettings(QueueLimits(), Limits()), dice)
    places: list[Place[Known]] = []
    for step in range(80):
        now += dice.choice((0.01, 0.5, 4.0))
        held = [place for place in places if place.admitted is not None]
        match dice.randrange(7):
            case 0 | 1:
                waiting = Waiting(f"r{step}", "tenant", 0, 50, now)
                places.append(Place(waiting, 50, dice.choice((10, 200)), AttemptKey(f"r{step}", 1)))
                gate.enter(places[-1])
            case 2 if held:
                admitted = dice.choice(held).admitted
                assert admitted is not None
                if slow.seated[admitted] == 0.0:
                    gate.seated(admitted, now)
                    slow.seated[admitted] = now
                    gate.accepted(admitted, now)
                    slow.accepted[admitted] = now
            case 3 if held:
                place = dice.choice(held)
                assert place.admitted is not None
                slow.committed.add(place.admitted)
                gate.committed(place, now)
            case 4 if places:
                place = places.pop(dice.randrange(len(places)))
                if place.admitted is not None:
                    slow.seated.pop(place.admitted), slow.accepted.pop(place.admitted)
                gate.leave(place, now)
            case 5:
                member = dice.choice(pools.members[dice.choice(list(Role))])
                now += 0.001
                free, waits = dice.randrange(41), dice.randrange(300)
                member.load = MemberLoad(free_pages=free, waiting_tokens=waits, draining=not dice.randrange(5))
                member.seen_at = now
                now += 0.001
            case 6 if not dice.randrange(4):
                role, number = dice.choice(list(Role)), dice.randrange(3)
                if all(place.admitted is None for place in places):
                    pools.members[role][number] = Pools.make(role, number)
                    pools.members[role][number].seen_at = now
        for place in gate.look(now):
            assert place.admitted is not None
            slow.seated[place.admitted] = slow.accepted[place.admitted] = 0.0
        compare(gate._views, slow, pools, now)
        assert gate.check() == []


def test_what_was_sent_is_forgotten_when_news_count_it() -> None:
    unseen = Unseen()
    for key, pages in (("a", 1), ("b", 2), ("c", 4)):
        unseen.add(key, Sent(pages, 10 * pages))
    unseen.taken("a", 1.0)
    unseen.taken("b", 2.0)
    unseen.taken("never", 2.0)
    unseen.settle(1.0)
    assert (unseen.pages, unseen.tokens, unseen.sequences) == (6, 60, 2)
    unseen.discard("b")
    unseen.discard("b")
    unseen.settle(9.0)
    assert (unseen.pages, unseen.sequences, bool(unseen)) == (4, 1, True)  # what is on the way is in no news
    unseen.discard("c")
    assert (unseen.pages, unseen.tokens, unseen.sequences, bool(unseen)) == (0, 0, 0, False)


def test_an_adapter_that_no_members_have_together_waits_and_those_behind_it_go() -> None:
    mine, other = Adapter("polite", "aa"), Adapter("polite", "bb")
    pools = Pools()
    limits = AdmissionSettings(QueueLimits(lookahead=1), Limits())
    turnstile: Turnstile[Known] = Turnstile(pools, limits, random.Random(1))

    def enter(name: str, adapter: Adapter | None) -> None:
        turnstile.enter(Place(Waiting(name, "t", 0, 4, 0.0), 4, 4, AttemptKey(name, 1), adapter=adapter))

    def admitted(now: float) -> list[tuple[str, str, str]]:
        placements = [(place.request_id, place.admitted) for place in turnstile.look(now)]
        return [(name, one.placement.decode_member, one.placement.prefill_member) for name, one in placements if one]

    def loaded(role: Role, place: int, adapter: Adapter) -> str:
        """Started again with it; the member's name."""
        member = pools.members[role][place] = Pools.make(role, place)
        member.info = replace(member.info, adapters=(adapter,), computes_prompts=False)
        return member.info.name

    enter("adapted", mine)
    enter("plain", None)
    assert [name for name, *_ in admitted(1.0)] == ["plain"]
    decode = loaded(Role.DECODE, 1, mine)
    loaded(Role.PREFILL, 0, other)
    assert admitted(1.1) == []
    prefill = loaded(Role.PREFILL, 2, mine)
    assert admitted(1.2) == [("adapted", decode, prefill)]


def one_at_a_time(waiting: int, seconds: int) -> tuple[Turnstile[Known], float]:
    """A turnstile that gives one ticket a second, with so many requests of four tokens in front of it at first; and the time."""
    pools = Pools()
    settings = AdmissionSettings(QueueLimits(max_requests=500), Limits(total_tokens=4), queue_share=0.5)
    turnstile = Turnstile(pools, settings, random.Random(1))
    places = [place_of(f"r{number}", "t") for number in range(waiting)]
    for place in places:
        turnstile.enter(place)
    assert [*turnstile.look(0.0)] == places[:1]
    for second in range(1, seconds + 1):
        turnstile.committed(places[second - 1], float(second))
        turnstile.leave(places[second - 1], float(second))
        assert [*turnstile.look(float(second))] == [places[second]]
    return turnstile, float(seconds)


def place_of(name: str, tenant: str, at: float = 0.0) -> Place[Known]:
    return Place(Waiting(name, tenant, 0, 4, at), 4, 4, AttemptKey(name, 1))


def test_who_would_wait_in_vain_is_refused_at_once_and_leaves_nothing() -> None:
    turnstile, now = one_at_a_time(41, 10)  # thirty wait
    late = place_of("late", "t", now)
    turnstile.enter(late)
    assert [*turnstile.look(now)] == []
    with pytest.raises(WaitTooLong) as refused:
        turnstile.not_in_vain(late, 40.0, now)  # half of it is too short
    assert 25 < refused.value.wait_s < 35 and refused.value.left_s == 40.0
    assert refused.value.after_s == refused.value.wait_s
    assert turnstile.check() == [] and len(turnstile.queue) == 30 and turnstile.tickets == 1
    assert turnstile.queue.statistics().refused == 1
    turnstile.enter(late)  # it comes again and has more time
    turnstile.not_in_vain(late, 90.0, now)
    turnstile.not_in_vain(late, None, now)
    assert len(turnstile.queue) == 31


def test_who_comes_back_was_offered_once_and_each_is_told_a_time_of_its_own() -> None:
    turnstile, now = one_at_a_time(41, 10)
    offered = turnstile.queue.statistics().offered_tokens
    told = []
    for name in ("a", "b", "a", "c"):
        turnstile.enter(place := place_of(name, "t", now))
        with pytest.raises(WaitTooLong) as refused:
            turnstile.not_in_vain(place, 30.0, now)
        told.append(refused.value.after_s)
    assert told[0] < told[1] == told[2] < told[3], "one after the other, as their turns will be"
    counts = turnstile.queue.statistics()
    assert (counts.offered_tokens, counts.returned) == (offered + 12, 1)
    other = place_of("d", "t", now)
    other.returned = True  # it was refused elsewhere
    turnstile.enter(other)
    assert turnstile.queue.statistics().offered_tokens == offered + 12


def test_a_full_queue_tells_the_time_of_all_that_waits() -> None:
    turnstile, now = one_at_a_time(500, 20)
    while len(turnstile.queue) < 500:
        turnstile.enter(place_of(f"more{len(turnstile.queue)}", "t", now))
    with pytest.raises(QueueFull) as full:
        turnstile.enter(late := place_of("late", "t", now))
    assert full.value.after_s == RETRY_AFTER_MAX_S and turnstile.check() == []
    offered = turnstile.queue.statistics().offered
    with pytest.raises(QueueFull):
        turnstile.enter(late)
    assert turnstile.queue.statistics().offered == offered


def test_the_queue_of_another_tenant_is_not_in_the_way() -> None:
    turnstile, now = one_at_a_time(41, 10)
    modest = place_of("modest", "other", now)
    turnstile.enter(modest)
    assert [*turnstile.look(now)] == []
    turnstile.not_in_vain(modest, 5.0, now)
    assert turnstile.queue.ahead(modest.waiting) == 8 and len(turnstile.queue) == 31


def test_nobody_is_refused_by_a_pace_that_is_not_known() -> None:
    for waiting, seconds in ((41, 4), (500, 3)):
        turnstile, now = one_at_a_time(waiting, seconds)
        late = place_of("late", "t", now)
        turnstile.enter(late)
        turnstile.not_in_vain(late, 0.001, now)
        assert len(turnstile.queue) == waiting - seconds


def test_prompts_are_offered_once_and_ready_once() -> None:
    turnstile, now = one_at_a_time(12, 10)
    assert turnstile.queue.statistics().offered_tokens == 48 and turnstile.ready_tokens == 40
    turnstile.enter(place := place_of("more", "t", now))
    turnstile.leave(place, now)
    last = place_of("last", "t", now)
    turnstile.enter(last)
    turnstile.queue.remove("r11")
    turnstile.committed(last, now)  # it holds nothing yet
    assert turnstile.queue.statistics().offered_tokens == 56 and turnstile.ready_tokens == 40


@pytest.mark.parametrize(("prompt", "limits"), [(50, Limits(tenant_tokens=50, total_tokens=50)), (400, Limits())])
def test_a_prompt_as_long_as_may_be_in_work_comes_to_work_again_with_what_was_chosen(prompt: int, limits: Limits) -> None:
    """Its decode member was lost: the next prompt is longer than the budget of its tenant, or than a member's queue, ever is."""
    gate = Turnstile(Pools(), AdmissionSettings(QueueLimits(), limits), random.Random(1))
    place = Place(Waiting("r", "t", 0, prompt, 0.0), prompt, 40, AttemptKey("r", 1))
    gate.enter(place)
    assert [*gate.look(1.0)] == [place]
    gate.committed(place, 1.0)
    place.key, place.chosen_tokens = AttemptKey("r", 2), 8
    gate.again(place, (), 2.0)
    assert [*gate.look(2.0)] == [place]
    assert place.admitted is not None and place.admitted.demand.prefill_tokens == prompt + 8
    held = gate.book.held(Budget(Resource.TOKENS, Scope.MEMBER, place.admitted.placement.prefill_member))
    assert held == min(prompt + 8, 400) and gate.check() == []
    assert gate.book.held(Budget(Resource.TOKENS, Scope.TENANT, "t")) == (limits.tenant_tokens or 0)
    gate.leave(place, 3.0)
    assert gate.book.statistics().held == {}

"""The pools as placement sees them: each member's last news, and what this router has sent there since. Pure.

A view is made again only when its member told news, got old, or was sent something, so a look at a large pool with many
waiting requests costs little more than the members that changed.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lifecycle.adapters import Adapter
from lifecycle.prefix_keys import PrefixKeys
from router.adapters import servable
from router.member_facts import KnownMember, M, Role, largest
from router.placement import DecodeView, Need, PrefillView
from router.unseen import Unseen

V = TypeVar("V")


class Pools(Protocol[M]):
    """The members that are known now."""

    def usable(self, role: Role) -> Sequence[M]:
        """Members of a pool that new work can go to, one for each name."""

    def stale_at(self, member: M) -> float:
        """From when on its last news is old, in seconds of the clock that `now` is read from."""


@dataclass(frozen=True, slots=True)
class Room:
    """At least what the roomiest member of each pool could take: a request that wants more fits nowhere.

    `tokens` None: no prefill member limits prompts now; nor does one that has nothing to do.
    """

    pages: int
    tokens: int | None

    def could_fit(self, need: Need) -> bool:
        """False only when no member has room; who may be asked at all is not looked at."""
        if need.pages > self.pages:
            return False
        elsewhere = need.moved or need.alone or bool(need.excluded) or bool(need.near.decode.places)
        return elsewhere or self.tokens is None or need.prompt_tokens <= self.tokens


class Shelf(Generic[M, V]):
    """The views of one pool, kept until they change. `view`: of a member, what was sent there, whether its news is old."""

    def __init__(self, role: Role, view: Callable[[M, Unseen, bool], V]) -> None:
        self.role = role
        self.sent: dict[M, Unseen] = {}
        self.members: dict[str, M] = {}
        self.views: list[V] = []
        self._view = view
        self._known: list[tuple[M, object, float]] = []
        self._places: dict[str, int] = {}
        self._fresh_until = -math.inf

    def refresh(self, pools: Pools[M], now: float) -> Sequence[int]:
        """Bring the views up to date; the places of those that were made again."""
        usable = pools.usable(self.role)
        if now >= self._fresh_until or len(usable) != len(self._known):
            return self._rebuild(pools, usable, now)
        changed = []
        for place, member in enumerate(usable):
            known, load, seen_at = self._known[place]
            if known is not member:
                return self._rebuild(pools, usable, now)
            if load is not member.load or seen_at != member.seen_at:
                self._known[place] = (member, member.load, member.seen_at)
                stale_at = pools.stale_at(member)
                if stale_at >= now:
                    self._fresh_until = min(self._fresh_until, stale_at)
                self.views[place] = self._made(member, stale_at < now)
                changed.append(place)
        return changed

    def touch(self, pools: Pools[M], member: M, now: float) -> Sequence[int]:
        """Something was sent to a member, or has ended there; its place, if it has one."""
        place = self._places.get(member.info.name)
        if place is None or self._known[place][0] is not member:
            return ()
        self.views[place] = self._made(member, pools.stale_at(member) < now)
        return (place,)

    def place_of(self, member: M) -> int | None:
        """Where its view is; None when new work can not go to it."""
        place = self._places.get(member.info.name)
        return place if place is not None and self._known[place][0] is member else None

    def at(self, place: int) -> M:
        """The member whose view is there."""
        return self._known[place][0]

    def unseen(self, member: M) -> Unseen:
        """The sums of a member, to add to."""
        return self.sent.setdefault(member, Unseen())

    def _rebuild(self, pools: Pools[M], usable: Sequence[M], now: float) -> Sequence[int]:
        self._known = [(member, member.load, member.seen_at) for member in usable]
        self.members = {member.info.name: member for member in usable}
        self._places = {member.info.name: place for place, member in enumerate(usable)}
        ends = [pools.stale_at(member) for member in usable]
        self._fresh_until = min((at for at in ends if at >= now), default=math.inf)
        self.views = [self._made(member, at < now) for member, at in zip(usable, ends, strict=True)]
        self.sent = {member: sent for member, sent in self.sent.items() if sent}
        return range(len(usable))

    def _made(self, member: M, stale: bool) -> V:
        sent = self.sent.get(member, _NOTHING)
        sent.settle(member.seen_at)
        return self._view(member, sent, stale)


_NOTHING = Unseen()


class PoolViews(Generic[M]):
    """Both pools."""

    def __init__(self, pools: Pools[M]) -> None:
        self._pools = pools
        self.decode: Shelf[M, DecodeView] = Shelf(Role.DECODE, _decode_view)
        self.prefill: Shelf[M, PrefillView] = Shelf(Role.PREFILL, _prefill_view)
        self.room = Room(0, None)
        #: Page size that requests are measured with, and output that a seat is promised at most (0: all of it), in tokens.
        #: sequence_pages: as in MemberInfo.
        self.page_tokens = 1
        self.sequence_pages = 0
        #: Makes the keys that members know prefixes by; None while they keep none.
        self.prefix_keys: PrefixKeys | None = None
        self.expected_output_tokens = 0
        #: What members have that goes together, see router.adapters.
        self.adapters: frozenset[Adapter] = frozenset()
        self._expected: list[int] = []
        self._seen: tuple[dict[str, M], dict[str, M]] = ({}, {})

    def refresh(self, now: float) -> bool:
        """Bring everything up to date with the members' news; False without a decode pool."""
        decode = self.decode.refresh(self._pools, now)
        if len(decode) == len(self.decode.views) > 0:
            most = largest(list(self.decode.members.values())).info
            self.page_tokens, self.sequence_pages = most.page_tokens, most.sequence_pages
            self.prefix_keys = PrefixKeys(most.prefix_identity, most.page_tokens) if most.prefix_identity else None
        if decode:
            self._expect(decode)
        prefill = self.prefill.refresh(self._pools, now)
        self._see_adapters()
        self._raise_room(decode, prefill)
        return bool(self.decode.views)

    def sent(self, decode: M, prefill: M | None, now: float) -> None:
        """What was sent to these members, or is there no longer, has changed."""
        touched = self.prefill.touch(self._pools, prefill, now) if prefill is not None else ()
        self._raise_room(self.decode.touch(self._pools, decode, now), touched)

    def look_for_room(self) -> None:
        """A request found no member although `room` let it through: see what is left exactly."""
        self.room = Room(0, None)
        self._raise_room(range(len(self.decode.views)), range(len(self.prefill.views)))

    def _see_adapters(self) -> None:
        """What a member has is fixed for its life, so only another set of members can change it."""
        decode, prefill = self.decode.members, self.prefill.members
        if self._seen[0] is not decode or self._seen[1] is not prefill:
            self._seen = (decode, prefill)
            infos = [[member.info for member in members.values()] for members in self._seen]
            self.adapters = servable(*infos)

    def _expect(self, places: Sequence[int]) -> None:
        """The member is chosen after the demand is known: what the most careful one promises."""
        said = [self.decode.at(place).load.expected_output_tokens for place in places]
        if len(places) == len(self.decode.views):
            self._expected = said
        elif all(self._expected[place] == tokens for place, tokens in zip(places, said, strict=True)):
            return
        for place, tokens in zip(places, said, strict=True):
            self._expected[place] = tokens
        self.expected_output_tokens = max(self._expected) if all(self._expected) else 0

    def _raise_room(self, decode: Sequence[int], prefill: Sequence[int]) -> None:
        pages, tokens = self.room.pages, self.room.tokens
        for place in decode:
            target = self.decode.views[place]
            if not target.draining:
                pages = max(pages, target.free_pages - target.inflight_pages)
        for place in prefill:
            source = self.prefill.views[place]
            if not source.draining:
                queued = source.waiting_tokens + source.inflight_tokens
                left = source.max_queued_tokens - queued if queued else sys.maxsize
                tokens = left if tokens is None else max(tokens, left)
        if not self.prefill.views:
            tokens = None
        if (pages, tokens) != (self.room.pages, self.room.tokens):
            self.room = Room(pages, tokens)


def _decode_view(member: KnownMember, sent: Unseen, stale: bool) -> DecodeView:
    info, load = member.info, member.load
    return DecodeView(
        member=info.name,
        total_pages=info.total_pages,
        free_pages=load.free_pages,
        max_sequences=info.max_sequences,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        waiting_tokens=load.waiting_tokens,
        decode_step_s=_finite(load.decode_step_s),
        prefill_tokens_per_s=_finite(load.prefill_tokens_per_s),
        computes_prompts=info.computes_prompts,
        draining=load.draining,
        stale=stale,
        adapters=info.adapters,
        inflight_pages=sent.pages,
        inflight_sequences=sent.sequences,
        inflight_tokens=sent.tokens,
    )


def _prefill_view(member: KnownMember, sent: Unseen, stale: bool) -> PrefillView:
    return PrefillView(
        member=member.info.name,
        max_queued_tokens=member.info.max_queued_tokens,
        waiting_tokens=member.load.waiting_tokens,
        prefill_tokens_per_s=_finite(member.load.prefill_tokens_per_s),
        draining=member.load.draining,
        stale=stale,
        inflight_tokens=sent.tokens,
        adapters=member.info.adapters,
    )


def _finite(value: float) -> float:
    """A member's measurement, 0 (not measured) when it is no sensible number."""
    return value if math.isfinite(value) and value > 0 else 0.0

"""The members of both pools as this router sees them: one Watch stream to each, its last news with their age.

A member is known by name and incarnation. Its channel lives as long as a request uses it, even when the member has left
discovery: a draining member finishes its streams after its address is gone.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import grpc

from lifecycle.adapters import Adapter
from router import adapters
from router.budget import Capacity
from router.discovery import resolve
from router.member_facts import MemberInfo, largest
from router.member_link import LinkSettings, Member, MemberLink, Role
from router.nearness import Hints
from router.prefix_hints import PrefixHints
from router.request import ServedModel
from rpc import clocks
from rpc.application import lasting
from rpc.channels import internal_channel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembersSettings:
    """Targets of each pool (host:port or dns:///host:port); an empty prefill pool means that decode computes prompts.

    prefix_hints: what is remembered at most of each member's prefix cache, in pages.
    """

    targets: Mapping[Role, tuple[str, ...]]
    link: LinkSettings
    resolve_every_s: float = 2.0
    prefix_hints: int = 16_384


class Members:
    """Keeps the links. `changed` is called whenever something about any member changed, `crashed` when the keeping broke,
    `dial` opens a channel to an address."""

    def __init__(
        self,
        settings: MembersSettings,
        model: ServedModel,
        changed: Callable[[], None],
        crashed: Callable[[BaseException], None],
        dial: Callable[[str], grpc.aio.Channel] = internal_channel,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tell = changed
        self._crashed = crashed
        self._dial = dial
        self._news = asyncio.Event()
        self.hints: Hints[Member] = {role: PrefixHints(settings.prefix_hints) for role in Role}
        self._links: dict[tuple[Role, str], MemberLink] = {}
        self._leaving: list[MemberLink] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def computes_prompts_in_decode(self) -> bool:
        """Whether there is no prefill pool by configuration."""
        return not self._settings.targets[Role.PREFILL]

    async def start(self) -> None:
        """Resolves the targets once and keeps following them."""
        await self._discover()
        self._task = lasting(asyncio.create_task(self._follow(), name="discovery"), self._crashed)

    async def met(self, timeout_s: float) -> bool:
        """Waits until every member found so far has sent news; False when some had not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(link.member is None for link in self._links.values()):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends every watch and channel."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        links, self._links, leaving, self._leaving = list(self._links.values()), {}, self._leaving, []
        await asyncio.gather(*(link.close() for link in (*links, *leaving)))

    def usable(self, role: Role) -> list[Member]:
        """Members of a pool that new work can go to, one for each name: reachable, and with this router's model."""
        found: dict[str, Member] = {}
        for (pool, _), link in self._links.items():
            member = link.member
            if pool is role and member is not None and self._fits(member, role):
                known = found.get(member.name)
                if known is None or member.seen_at > known.seen_at:
                    found[member.name] = member
        return list(found.values())

    def linked(self) -> Iterator[tuple[Role, str, Member | None]]:
        """Every address of the pools with the member that was there last; None: it was never reached."""
        for (role, address), link in self._links.items():
            yield role, address, link.member

    def unfit(self, member: Member, pool: Role) -> str:
        """Why a member that is there cannot be used in the pool that it is listed for; empty when it can."""
        if member.info.role is not pool:
            return f"is listed as {pool.value} but is not one"
        if member.info.model_snapshot != self._model.snapshot:
            return f"serves another model snapshot: {member.info.model_snapshot}"
        return ""

    def taking(self, role: Role) -> list[Member]:
        """Usable members that take new work: not those that drain."""
        return [member for member in self.usable(role) if not member.load.draining]

    def find(self, name: str, incarnation: str) -> Member | None:
        """The decode member that is this very process; None when it is not known, or lost."""
        for (role, _), link in self._links.items():
            member = link.member
            if role is Role.DECODE and member is not None and (member.name, member.info.incarnation) == (name, incarnation):
                return None if member.lost else member
        return None

    def stale_at(self, member: Member) -> float:
        """From when on its last news is old, in monotonic seconds."""
        return member.seen_at + self._settings.link.stale_after_s

    def stale(self, member: Member) -> bool:
        """Whether its last news is old."""
        return clocks.monotonic() > self.stale_at(member)

    def capacity(self) -> Capacity:
        """What the members known now hold of a single request; the model's own context while no decode member is known."""
        decode = self.usable(Role.DECODE)
        context = self._model.context_tokens
        if not decode:
            return Capacity(context_tokens=context, page_tokens=0, member_pages=0)
        most = largest(decode).info
        prefill = self.usable(Role.PREFILL)
        contexts = [member.info.context_tokens for member in decode if member.info.context_tokens]
        return Capacity(
            context_tokens=min([context, *([max(contexts)] if contexts else [])]),
            page_tokens=most.page_tokens,
            member_pages=most.total_pages,
            sequence_pages=most.sequence_pages,
            member_tokens=max((member.info.max_queued_tokens for member in prefill), default=None),
        )

    def adapter(self, name: str) -> Adapter:
        """The adapter that a name means now. Raises StatusError, as router.adapters.chosen."""
        return adapters.chosen(name, *self._infos())

    def adapters(self) -> list[str]:
        """Names of the adapters that can be asked for now."""
        return sorted({each.name for each in adapters.servable(*self._infos())})

    def _infos(self) -> tuple[list[MemberInfo], list[MemberInfo]]:
        decode, prefill = ([member.info for member in self.usable(role)] for role in (Role.DECODE, Role.PREFILL))
        return decode, prefill

    def faults(self) -> list[str]:
        """Sentences about members that are there but cannot be used."""
        found = []
        for (pool, address), link in self._links.items():
            member = link.member
            if member is None:
                found.append(f"{pool.value} member at {address} was never reached")
            elif why := self.unfit(member, pool):
                found.append(f"{member.name} at {address} {why}")
        return [*found, *adapters.unlike(member.info for role in Role for member in self.usable(role))]

    def statistics(self) -> dict[str, int]:
        """Members by pool and condition, for gauges."""
        counts = {f"{role.value}_{kind}": 0 for role in Role for kind in ("usable", "stale")}
        for role in Role:
            for member in self.taking(role):
                counts[f"{role.value}_{'stale' if self.stale(member) else 'usable'}"] += 1
        return counts

    def _changed(self) -> None:
        self._news.set()
        self._tell()

    def _fits(self, member: Member, role: Role) -> bool:
        return member.reachable and not self.unfit(member, role)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resolve_every_s)
            await self._discover()

    async def _discover(self) -> None:
        for role, targets in self._settings.targets.items():
            known = frozenset(address for pool, address in self._links if pool is role)
            wanted = await resolve(targets, known, self._settings.resolve_every_s)
            for address in sorted(wanted - known):
                self._links[role, address] = MemberLink(
                    address, self._settings.link, self._changed, self._crashed, self._dial, self.hints[role]
                )
            for address in sorted(known - wanted):
                self._leaving.append(self._links.pop((role, address)))
        idle = [link for link in self._leaving if not link.in_use]
        self._leaving = [link for link in self._leaving if link.in_use]
        for link in idle:
            await link.close()

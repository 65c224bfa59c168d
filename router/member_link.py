"""The link to one address: a Watch stream that is opened again whenever it breaks, and the member behind it."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from lifecycle.adapters import Adapter
from lifecycle.pages_by_state import PagesByState
from router.member_facts import MemberInfo, MemberLoad, Role
from router.prefix_hints import PrefixHints, PrefixNews
from router.streams import EOF
from rpc import clocks
from rpc.application import lasting
from tandem.pools.v1 import member_pb2, member_pb2_grpc

__all__ = ["LinkSettings", "Member", "MemberInfo", "MemberLink", "MemberLoad", "Role"]

_log = logging.getLogger(__name__)


_ROLES = {member_pb2.MEMBER_ROLE_PREFILL: Role.PREFILL, member_pb2.MEMBER_ROLE_DECODE: Role.DECODE}


#: The wait for news is made of so many: a pause of this process takes up one of them at most.
_SILENCE_PARTS = 4


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Durations in seconds: news older than `stale_after_s` is stale; without any for `lost_after_s` the member is lost."""

    router: str
    stale_after_s: float = 3.0
    lost_after_s: float = 10.0
    backoff_s: float = 0.1
    backoff_max_s: float = 2.0


@dataclass(eq=False, slots=True)
class Member:
    """One incarnation of a member. Compared by identity; `seen_at` is the monotonic time of its last news."""

    info: MemberInfo
    channel: grpc.aio.Channel
    load: MemberLoad = field(default_factory=MemberLoad)
    seen_at: float = 0.0
    reachable: bool = True
    lost: str = ""
    #: Streams that run on it now, each with what is to be called when the member is lost.
    users: dict[object, Callable[[str], None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, kept over restarts."""
        return self.info.name

    def lose(self, why: str, level: int = logging.WARNING) -> None:
        """It is gone for good, or must be taken for gone: tells everyone who uses it, once."""
        if self.lost:
            return
        self.lost, self.reachable = why, False
        _log.log(level, "member %s (%s) is lost: %s", self.name, self.info.incarnation, why)
        for tell in list(self.users.values()):
            tell(why)


class MemberLink:
    """Keeps `member` current. `changed` is called after every news, `crashed` when the keeping broke; `dial` opens channels.

    `hints`: of its pool, told what the member has and dropped with it.
    """

    def __init__(
        self,
        address: str,
        settings: LinkSettings,
        changed: Callable[[], None],
        crashed: Callable[[BaseException], None],
        dial: Callable[[str], grpc.aio.Channel],
        hints: PrefixHints[Member],
    ) -> None:
        self._hints = hints
        self.address = address
        self.member: Member | None = None
        self._settings = settings
        self._changed = changed
        self._channel = dial(address)
        self._former: list[Member] = []
        self._task = lasting(asyncio.create_task(self._run(), name=f"watch {address}"), crashed)

    @property
    def in_use(self) -> bool:
        """Whether any stream runs over its channel."""
        return any(member.users for member in (self.member, *self._former) if member is not None)

    async def close(self) -> None:
        """Ends the watch and the channel."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.member is not None:
            self._lose(self.member, "the router closed its link", logging.INFO)
        await self._channel.close(None)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if await self._watch():
                    failures = 0
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _log.info("watch of %s ended: %s", self.address, _why(error))
            self._broken()
            wait_s = min(self._settings.backoff_max_s, self._settings.backoff_s * 2 ** min(failures, 10))
            failures += 1
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _watch(self) -> bool:
        """Follows one Watch stream to its end; whether it brought any news."""
        stub: Any = member_pb2_grpc.MemberServiceStub(self._channel)
        call = stub.Watch(member_pb2.WatchRequest(router=self._settings.router))
        any_news = False
        try:
            while True:
                news = await self._read(call)
                if news is EOF:
                    return any_news
                any_news = True
                self._take(news)
        finally:
            call.cancel()

    async def _read(self, call: Any) -> Any:
        """The next news. Raises TimeoutError when there is none for lost_after_s.

        Counted in parts: when this process itself stood still, what arrived meanwhile is read before the member is blamed.
        """
        reading = asyncio.ensure_future(call.read())
        try:
            for _ in range(_SILENCE_PARTS):
                if (await asyncio.wait({reading}, timeout=self._settings.lost_after_s / _SILENCE_PARTS))[0]:
                    return reading.result()
            raise TimeoutError
        finally:
            reading.cancel()

    def _take(self, news: Any) -> None:
        if news.HasField("info"):
            self._introduce(_info(news.info))
        if self.member is not None:
            self.member.load = _load(news.load)
            self.member.seen_at = clocks.monotonic()
            self.member.reachable = not self.member.lost
            if news.HasField("prefixes") and not self.member.lost:
                told = news.prefixes
                self._hints.told(self.member, PrefixNews(told.stored, told.evicted, told.anew))
        self._changed()

    def _introduce(self, info: MemberInfo) -> None:
        known = self.member
        if known is not None and known.info.incarnation == info.incarnation and not known.lost:
            return
        if known is not None:
            self._lose(known, f"incarnation {info.incarnation} runs at {self.address} now")
            self._former = [member for member in (*self._former, known) if member.users]
        self.member = Member(info, self._channel, seen_at=clocks.monotonic())
        _log.info("member %s (%s, %s) at %s", info.name, info.role and info.role.value, info.incarnation, self.address)

    def _broken(self) -> None:
        member = self.member
        if member is None:
            return
        member.reachable = False
        if clocks.monotonic() - member.seen_at >= self._settings.lost_after_s:
            self._lose(member, f"no sign of life for {self._settings.lost_after_s:g} s")
        self._changed()

    def _lose(self, member: Member, why: str, level: int = logging.WARNING) -> None:
        self._hints.drop(member)
        member.lose(why, level)


def _why(error: grpc.aio.AioRpcError | TimeoutError) -> str:
    return f"{error.code().name} {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else "no news in time"


def _info(info: Any) -> MemberInfo:
    return MemberInfo(
        name=info.peer.member,
        incarnation=info.peer.incarnation,
        address=info.peer.address,
        role=_ROLES.get(info.role),
        model_snapshot=info.model_snapshot,
        page_tokens=info.page_tokens,
        total_pages=info.total_pages,
        context_tokens=info.context_tokens,
        max_sequences=info.max_sequences,
        max_queued_tokens=info.max_queued_tokens,
        computes_prompts=info.computes_prompts,
        sequence_pages=info.sequence_pages,
        prefix_identity=info.prefix_identity,
        adapters=tuple(Adapter(each.name, each.identity) for each in info.adapters),
    )


def _load(load: Any) -> MemberLoad:
    return MemberLoad(
        free_pages=load.free_pages,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        waiting_tokens=load.waiting_tokens,
        quarantined_pages=load.quarantined_pages,
        draining=load.draining,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        expected_output_tokens=load.expected_output_tokens,
        preempted_sequences=load.preempted_sequences,
        paused_sequences=load.paused_sequences,
        steps=load.steps,
        tokens=load.tokens,
        pages=PagesByState(
            free=load.pages.free,
            owned=load.pages.owned,
            cached=load.pages.cached,
            granted=load.pages.granted,
            quarantined=load.pages.quarantined,
            pinned=load.pages.pinned,
        ),
    )

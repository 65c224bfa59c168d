"""MemberService: what a member is and how busy it is, told to any number of routers."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from lifecycle.adapters import Adapter
from lifecycle.pages_by_state import NO_PAGES, PagesByState
from member.prefix_feed import PrefixFeed, PrefixNews
from rpc.application import lasting
from rpc.status import StatusError, draining, resource_exhausted
from tandem.pools.v1 import grant_pb2, member_pb2, member_pb2_grpc

SERVICE_NAME = "tandem.pools.v1.MemberService"
#: Least seconds between two looks at the load, and so between two messages.
LOOK_PERIOD_S = 0.05
#: Most seconds between two messages.
REPEAT_PERIOD_S = 1.0
#: Most watchers at once.
MAX_WATCHERS = 256


class MemberRole(Enum):
    """Which pool."""

    PREFILL = member_pb2.MEMBER_ROLE_PREFILL
    DECODE = member_pb2.MEMBER_ROLE_DECODE


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member is; the same from its start to its end. `total_pages` are those that can be given out, of the KV group that
    requests are measured by. sequence_pages: most that one sequence holds at once; 0: as many as its tokens need.
    prefix_identity: as in lifecycle.prefix_keys.PrefixKeys; empty: it keeps no prefixes.
    """

    member: str
    incarnation: str
    address: str
    role: MemberRole
    model: str
    model_snapshot: str
    layout_fingerprint: str
    page_tokens: int
    total_pages: int
    context_tokens: int
    vocabulary_size: int
    max_sequences: int
    max_queued_tokens: int = 0
    computes_prompts: bool = False
    sequence_pages: int = 0
    prefix_identity: bytes = b""
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """How busy a member is. `tokens`: since the start, prompt tokens computed (prefill) or tokens chosen (decode)."""

    free_pages: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    quarantined_pages: int = 0
    draining: bool = False
    steps: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    preempted_sequences: int = 0
    expected_output_tokens: int = 0
    pages: PagesByState = NO_PAGES
    paused_sequences: int = 0
    tokens: int = 0


class MemberServicer(member_pb2_grpc.MemberServiceServicer):
    """Streams a member's load. One task looks at it for all watchers; a slow watcher gets the newest, not all. `crashed` is
    called when it broke: routers would go on by news that are no longer true."""

    def __init__(
        self,
        info: Callable[[], MemberInfo],
        load: Callable[[], MemberLoad],
        is_draining: Callable[[], bool],
        crashed: Callable[[BaseException], None],
        prefixes: PrefixFeed | None = None,
    ) -> None:
        self._info = info
        self._load = load
        self._is_draining = is_draining
        self._crashed = crashed
        self._prefixes = prefixes or PrefixFeed()
        self._told_prefixes = 0
        self._news: MemberLoad | None = None
        self._version = 0
        self._told = asyncio.Condition()
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watchers(self) -> int:
        """Open watches."""
        return self._watchers

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  (the name is the RPC's)
        """Description and load at once, then the load at each change and at least once in REPEAT_PERIOD_S, and with it what has
        changed in the prefix cache."""
        info = self._info()
        if self._closed:
            raise draining(info.member)
        if self._watchers >= MAX_WATCHERS:
            raise _too_many(info.member)
        self._watchers += 1
        try:
            if self._looking is None:
                self._look()
                self._looking = lasting(asyncio.create_task(self._keep_looking(), name="member-load"), self._crashed)
            seen = self._version
            first: MemberInfo | None = info
            prefixes: int | None = None
            while True:
                # Noted before anything is written: what changes meanwhile is told the next time.
                told, prefixes = self._prefixes.since(prefixes), self._prefixes.version
                await context.write(_response(first, self._news, told[0] if told else None))
                for one in told[1:]:
                    await context.write(_response(None, self._news, one))
                first = None
                if not await self._next(seen):
                    break
                seen = self._version
            raise draining(info.member)
        finally:
            self._watchers -= 1
            if self._watchers == 0 and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def close(self) -> None:
        """End all watches; new ones are refused."""
        self._closed = True
        async with self._told:
            self._told.notify_all()

    async def _next(self, seen: int) -> bool:
        """Wait for a load after version `seen`, or REPEAT_PERIOD_S; False when the watches end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPEAT_PERIOD_S), self._told:
                await self._told.wait_for(lambda: self._version != seen or self._closed)
        return not self._closed

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            if self._look():
                async with self._told:
                    self._told.notify_all()

    def _look(self) -> bool:
        """Read the load; True when it changed."""
        load = self._load()
        if self._is_draining() and not load.draining:
            load = replace(load, draining=True)
        changed = load != self._news or self._prefixes.version != self._told_prefixes
        self._told_prefixes = self._prefixes.version
        if changed:
            self._news = load
            self._version += 1
        return changed


def _response(info: MemberInfo | None, load: MemberLoad | None, prefixes: PrefixNews | None = None) -> Any:
    response = member_pb2.WatchResponse(load=_load_message(load) if load is not None else None)
    if prefixes is not None:
        news = member_pb2.PrefixNews(anew=prefixes.anew, stored=prefixes.stored, evicted=prefixes.evicted)
        response.prefixes.CopyFrom(news)
    if info is not None:
        response.info.CopyFrom(_info_message(info))
    return response


def _load_message(load: MemberLoad) -> Any:
    return member_pb2.MemberLoad(
        free_pages=load.free_pages,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        waiting_tokens=load.waiting_tokens,
        quarantined_pages=load.quarantined_pages,
        draining=load.draining,
        steps=load.steps,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        preempted_sequences=load.preempted_sequences,
        expected_output_tokens=load.expected_output_tokens,
        paused_sequences=load.paused_sequences,
        tokens=load.tokens,
        pages=member_pb2.PagesByState(
            free=load.pages.free,
            owned=load.pages.owned,
            cached=load.pages.cached,
            granted=load.pages.granted,
            quarantined=load.pages.quarantined,
            pinned=load.pages.pinned,
        ),
    )


def _info_message(info: MemberInfo) -> Any:
    return member_pb2.MemberInfo(
        peer=grant_pb2.Peer(member=info.member, incarnation=info.incarnation, address=info.address),
        role=info.role.value,
        model=info.model,
        model_snapshot=info.model_snapshot,
        layout_fingerprint=info.layout_fingerprint,
        page_tokens=info.page_tokens,
        total_pages=info.total_pages,
        context_tokens=info.context_tokens,
        vocabulary_size=info.vocabulary_size,
        max_sequences=info.max_sequences,
        max_queued_tokens=info.max_queued_tokens,
        computes_prompts=info.computes_prompts,
        sequence_pages=info.sequence_pages,
        prefix_identity=info.prefix_identity,
        adapters=[grant_pb2.Adapter(name=each.name, identity=each.identity) for each in info.adapters],
    )


def _too_many(member: str) -> StatusError:
    return resource_exhausted(
        f"{member} is watched by its limit of {MAX_WATCHERS} routers", "TOO_MANY_WATCHERS", retry_after_s=REPEAT_PERIOD_S
    )

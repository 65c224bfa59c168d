"""Views of the cell for any number of watchers: made when somebody looks, shared by all that look at the same time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import islice

from router.cell_picture import MAX_LISTED, Known, KnownMember, KnownRequest, budgets_of, picture
from router.cell_view import CellView
from router.config import RouterSettings
from router.members import Members
from router.rates import Rates
from router.request import ServedModel
from router.route import Route
from router.routes import Routes
from router.store import StoreUnavailable
from router.store_totals import StoreTotals
from rpc import clocks
from rpc.status import StatusError, draining, resource_exhausted

_log = logging.getLogger(__name__)

#: Watchers at once, of gRPC and of the page together.
MAX_WATCHERS = 64
#: A view is shown to all who look within that time.
VIEW_KEPT_S = 0.1
#: Between two questions to the store, however many watch.
TOTALS_EVERY_S = 1.0
#: A view waits for its answer that long, in seconds.
TOTALS_WAIT_S = 1.0
#: How long whoever was refused waits before asking again.
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What is looked at: the parts of one router, its name with incarnation, and its address."""

    name: str
    address: str
    settings: RouterSettings
    model: ServedModel
    members: Members
    routes: Routes


class CellWatch:
    """See the module."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._max_queue = watched.settings.queue_requests
        self._rates = Rates()
        self._view: CellView | None = None
        self._viewed_at = 0.0
        self._totals: StoreTotals | None = None
        self._asked_at: float | None = None
        self._asking: asyncio.Task[StoreTotals] | None = None
        self._making = asyncio.Lock()
        self._closed = asyncio.Event()
        self._watchers = 0

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return self._watchers

    async def views(self, period_s: float) -> AsyncGenerator[CellView]:
        """A view at once, then one each `period_s`, until this router stops; to be closed with `contextlib.aclosing`.

        Raises StatusError when too many watch, and at the router's end.
        """
        if self._closed.is_set():
            raise draining(self._watched.name)
        if self._watchers >= MAX_WATCHERS:
            raise _too_many()
        self._watchers += 1
        try:
            while not self._closed.is_set():
                yield await self.view()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._closed.wait()
        finally:
            self._watchers -= 1
        raise draining(self._watched.name)

    async def view(self) -> CellView:
        """How the cell looks now, or a moment ago."""
        async with self._making:  # one question to the store, whoever asks
            now = clocks.monotonic()
            if self._view is None or now - self._viewed_at >= VIEW_KEPT_S:
                members = _known_members(self._watched.members)
                await self._ask_store(members, now)
                self._view, self._viewed_at = picture(self._known(members)), clocks.monotonic()
            return self._view

    def close(self) -> None:
        """The router stops: all watches end, new ones are refused."""
        self._closed.set()
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_store(self, members: list[KnownMember], now: float) -> None:
        """Brings the totals up to date, if it is time to. A store that is slow is shown as one that is away."""
        if self._asking is None:
            if self._asked_at is not None and now - self._asked_at < TOTALS_EVERY_S:
                return
            self._asked_at = now
            self._asking = asyncio.create_task(self._totals_now(members), name="cell totals")
        await asyncio.wait({self._asking}, timeout=TOTALS_WAIT_S)
        if not self._asking.done():
            self._totals = None
            return
        asked, self._asking = self._asking, None
        try:
            self._totals = None if asked.cancelled() else asked.result()
        except StoreUnavailable as away:
            _log.debug("views go without the store: %s", away)
            self._totals = None

    async def _totals_now(self, members: list[KnownMember]) -> StoreTotals:
        routes = self._watched.routes
        tenants = (route.record.tenant for route in islice(routes.live(), MAX_LISTED))
        labels = [budget.label for budget, _ in budgets_of(members, tenants, routes.cell.budgets)]
        return await routes.cell.store.totals(labels)

    def _known(self, members: list[KnownMember]) -> Known:
        """Everything at one moment: nothing is waited for in here."""
        watched, now = self._watched, clocks.monotonic()
        routes = watched.routes
        cell = routes.cell
        counts = {one.address: (one.info.incarnation, one.load.steps, one.load.tokens) for one in members if one.info is not None}
        return Known(
            now=now,
            wall=clocks.wall(),
            router=watched.name,
            address=watched.address,
            model=watched.model,
            context_tokens=watched.members.capacity().context_tokens,
            draining=routes.draining,
            has_prefill_pool=not watched.members.computes_prompts_in_decode,
            members=members,
            rates=self._rates.look(now, counts),
            queue=cell.admission.queue.statistics(),
            max_queue=self._max_queue,
            limits=cell.budgets,
            held=cell.admission.book.statistics().held,
            totals=self._totals,
            requests=[_known_request(route) for route in islice(routes.live(), MAX_LISTED)],
            running_requests=len(routes),
            ended=cell.ends.newest(),
            ended_requests=cell.ends.total,
        )


def _known_members(members: Members) -> list[KnownMember]:
    now = clocks.monotonic()
    known = []
    for role, address, member in members.linked():
        if member is None:
            known.append(KnownMember(role, address))
            continue
        known.append(
            KnownMember(
                role=role,
                address=address,
                info=member.info,
                load=member.load,
                news_age_s=max(0.0, now - member.seen_at),
                stale=not member.reachable or members.stale(member),
                lost=member.lost,
                unfit=members.unfit(member, role),
            )
        )
    return known


def _known_request(route: Route) -> KnownRequest:
    stream = route.stream
    return KnownRequest(
        request=route.request,
        record=route.record,
        progress=route.progress,
        readers=stream.readers,
        unsent_bytes=stream.unsent_bytes,
        send_s=stream.send_s,
        paused=stream.full,
    )


def _too_many() -> StatusError:
    return resource_exhausted(
        f"this router is watched by its limit of {MAX_WATCHERS} watchers", "TOO_MANY_WATCHERS", retry_after_s=_RETRY_S
    )

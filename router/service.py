"""A router as a process's application: its parts put together, started, counted and stopped."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

import models
from router import cell_servicer
from router.access import Access
from router.admission import Admission
from router.adoption import Adopter
from router.cancelling import Canceller
from router.cell import Cell, RetryBudget
from router.cell_servicer import CellServicer
from router.cell_watch import CellWatch, Watched
from router.choice_cancelling import ChoiceCanceller
from router.config import RouterSettings
from router.following import Follower
from router.grammar_check import GrammarCheck
from router.http import live_page
from router.http.door import HttpDoor
from router.keeping import AcceptedCancels, UnansweredCreates, UnwrittenEnds
from router.kept_streams import KeptStreams
from router.member_link import Role
from router.members import Members
from router.prompt import PromptEncoder
from router.redis_link import Observe, RedisSettings
from router.redis_store import RedisStore
from router.request import ServedModel
from router.router_peers import RouterPeers
from router.routes import Routes
from router.servicer import SERVICE_NAME, Door, InferenceServicer, generic_handler
from router.store import StoreUnavailable
from router.upkeep import Upkeep
from router.without_store import Outage
from rpc import clocks
from rpc.admin import Books
from rpc.application import Frame
from rpc.gate import Gate
from rpc.status import loading
from telemetry.router_metrics import STORE_CALLS, RouterGauges, RouterMetrics
from text import Tokenizer

#: Longest wait for the first news of all members before this router says that it is ready.
_FIRST_NEWS_S = 3.0
#: Longest wait of a scrape for the event loop.
_SCRAPE_S = 1.0
#: Shown when nothing waits: an absent series would look like a router that tells nothing.
_NO_QUEUE = {"0": 0.0}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a router needs of a model: no weights."""

    model: ServedModel
    tokenizer: Tokenizer


def load_model(name: str, served_name: str) -> LoadedModel:
    """The model's identity, sizes and tokenizer. Raises models.ModelError, text.ChatTemplateError, OSError."""
    ref = models.resolve(name)
    config = models.load_config(ref)
    model = ServedModel(served_name or ref.name, ref.snapshot, config.context_tokens, config.vocabulary_size)
    return LoadedModel(model, models.load_tokenizer(ref))


@dataclass(frozen=True, slots=True)
class Outside:
    """How a router reaches what is outside of it: opens the request store, and channels to other processes of the cell (None:
    as its process does)."""

    open_store: Callable[[RedisSettings, str, Observe], RedisStore] = RedisStore
    dial: Callable[[str], grpc.aio.Channel] | None = None


class Router:
    """rpc.application.Application for one router. `load` is called once, off the event loop."""

    service_names: Sequence[str] = (SERVICE_NAME, cell_servicer.SERVICE_NAME)

    def __init__(
        self,
        frame: Frame,
        settings: RouterSettings,
        load: Callable[[], LoadedModel] | None = None,
        outside: Outside | None = None,
    ) -> None:
        self._frame = frame
        self._settings = settings
        self._load = load or (lambda: load_model(settings.model, settings.served_model_name))
        self._outside = outside or Outside()
        self._metrics = RouterMetrics(frame.metrics)
        self._access = Access(settings)
        if self._access.required:
            frame.gate.know_client = self._access.client
        self._thread = threading.get_ident()
        self._parts: _Parts | None = None
        self._http: HttpDoor | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds InferenceService and CellService."""
        handlers = generic_handler(self._serving), cell_servicer.generic_handler(lambda: self._started().cell_servicer)
        server.add_generic_rpc_handlers(handlers)

    async def start(self) -> None:
        """Loads the tokenizer, finds members, takes the lease. Members and store may come later: they make nobody wait."""
        self._open_http()
        loaded = await asyncio.to_thread(self._load)
        self._parts = parts = _Parts(self._frame, self._settings, loaded, self._metrics, self._outside, self._access)
        loop = asyncio.get_running_loop()
        self._metrics.gauges_from(lambda: self._gauges(parts, loop))
        await parts.upkeep.start()
        await parts.members.start()
        await parts.members.met(_FIRST_NEWS_S)

    def stalled(self, now: float) -> bool:
        """Never: what a router does runs on the event loop that asks."""
        return False

    async def check(self) -> Books:
        """Recounts everything that is held here and, in total, in the store."""
        return Books() if self._parts is None else await self._parts.check()

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        if self._parts is not None:
            self._parts.routes.begin_drain()

    async def drained(self) -> None:
        """Returns when no request runs, none of another router is passed on, the store has taken every end, and HTTP clients
        their answers."""
        if self._parts is not None:
            await self._parts.routes.drained()
            await self._parts.peers.idle()
            await self._parts.unwritten.none_left()
        if self._http is not None:
            await self._http.idle()

    async def stop(self) -> None:
        """Ends what still runs with SHUTTING_DOWN, and everything else. Also after a start that failed."""
        parts, self._parts = self._parts, None
        try:
            if parts is not None:
                await parts.close()
        finally:
            http, self._http = self._http, None
            if http is not None:
                await http.stop()

    def _open_http(self) -> None:
        """Takes the port of the HTTP door, if there is to be one. Raises OSError."""
        if self._settings.http_listen is not None:
            page = live_page.part(lambda: self._started().cell_servicer)
            self._http = HttpDoor(self._settings.http_listen, self._frame, self._settings, self._serving, [page])
            self._frame.addresses.update(http_address=self._http.address, http_url=self._http.url)
            self._http.start()

    def _serving(self) -> InferenceServicer:
        return self._started().servicer

    def _started(self) -> "_Parts":
        if self._parts is None:
            raise loading(self._frame.name)
        return self._parts

    def _gauges(self, parts: "_Parts", loop: asyncio.AbstractEventLoop) -> RouterGauges:
        """Called in the scrape's thread; the sets belong to the event loop."""
        if threading.get_ident() == self._thread:
            return parts.gauges()

        async def count() -> RouterGauges:
            return parts.gauges()

        return asyncio.run_coroutine_threadsafe(count(), loop).result(_SCRAPE_S)


class _Parts:
    """Everything of a router that has started."""

    def __init__(
        self,
        frame: Frame,
        settings: RouterSettings,
        loaded: LoadedModel,
        metrics: RouterMetrics,
        outside: Outside,
        access: Access,
    ) -> None:
        # The end of an incarnation is its random part: what stands before is the same at each start on one machine.
        name = f"{frame.name}@{frame.incarnation[-12:]}"
        self._settings = settings
        dial = outside.dial or frame.dial
        self.store = outside.open_store(settings.redis_settings(), name, _observer(metrics))
        self.encoder = PromptEncoder(loaded.tokenizer, threads=settings.tokenise_threads, waiting=settings.tokenise_waiting)
        self.members = Members(settings.members_settings(name), loaded.model, self._look, frame.crashed, dial)
        admission = settings.admission_settings()
        budgets = partial(access.budgets, default=admission.budgets)
        self.admission = Admission(self.members, admission, random.Random(random.getrandbits(64)), budgets)
        self.unwritten = UnwrittenEnds(self.store)
        unanswered = UnansweredCreates(self.store)
        cell = Cell(
            store=self.store,
            admission=self.admission,
            unwritten=self.unwritten,
            unanswered=unanswered,
            cancels=AcceptedCancels(self.store),
            retries=RetryBudget(settings.retry_share, settings.retry_burst),
            limits=settings.route_limits(),
            metrics=metrics,
            tracing=frame.tracing,
            outage=Outage(settings.redis_outage),
            tenants=access.limits(),
            budgets=budgets,
        )
        self.routes = Routes(cell, KeptStreams(settings.keep_limits()))
        self.adopter = Adopter(self.routes, self.members, loaded.model, settings.adoption_limits())
        self.peers = RouterPeers(name, dial)
        self.upkeep = Upkeep(self.store, frame.address, self.routes, self.unwritten, self.adopter, frame.crashed)
        follower = Follower(self.routes, self.peers, self.adopter, settings.attach_wait_s)
        canceller = Canceller(self.routes, settings.cancel_wait_s)
        self.servicer = InferenceServicer(
            Door(
                settings=settings,
                model=loaded.model,
                encoder=self.encoder,
                members=self.members,
                routes=self.routes,
                canceller=canceller,
                choices=ChoiceCanceller(self.routes, self.peers, canceller.cancel),
                follower=follower,
                tracing=frame.tracing,
                gate=frame.gate,
                grammars=GrammarCheck(self.members, loaded.model.snapshot),
            )
        )

        self.cell_watch = CellWatch(Watched(name, frame.address, settings, loaded.model, self.members, self.routes))
        self.cell_servicer = CellServicer(self.cell_watch, partial(_sight, frame.gate))

    async def close(self) -> None:
        """Requests first, then what they used. Those who watch would keep the server from its end."""
        self.cell_watch.close()
        self.peers.stop()
        await self.adopter.stop()
        await self.routes.stop()
        await self.upkeep.stop()
        await self.members.close()
        self.encoder.close()
        await self.store.close()

    async def check(self) -> Books:
        """Counts and faults. Budgets of the store are totals of the cell, under store:LABEL."""
        faults = [*self.admission.check(), *self.members.faults()]
        books = {
            "tickets": self.admission.tickets(),
            "queue": len(self.admission.queue),
            "queue_tokens": self.admission.queue.waiting_tokens,
            "routes": len(self.routes),
            "requests_of_tenants": self.routes.cell.tenants.running_requests,
            "seats": self.routes.seats(),
            "streams": self.routes.streams(),
            "readers": self.routes.readers(),
            "cell_watchers": self.cell_watch.watchers,
            "passed_on": len(self.peers),
            "adoptions": len(self.adopter),
            "unsent_bytes": self.routes.unsent_bytes(),
            "unwritten_ends": len(self.unwritten),
            "prompts_being_tokenised": self.encoder.busy,
        }
        if books["tickets"] < books["seats"]:
            faults.append(f"{books['seats']} seats are open, {books['tickets']} tickets are held")
        try:
            stored = await self.store.books()
        except StoreUnavailable as away:
            faults.append(f"the request store does not answer: {away}")
        else:
            books["store_live_requests"] = stored.live_requests
            books["reservations"] = sum(stored.reserved.values())
            books.update({f"store:{label}": units for label, units in stored.reserved.items()})
            faults.extend(stored.faults)
        return Books(books, tuple(faults))

    def gauges(self) -> RouterGauges:
        """What is held now."""
        now, waiting = clocks.monotonic(), self.admission.queue.statistics()
        members = self.members.statistics()
        kept_streams, kept_bytes = self.routes.kept_streams()
        stored = self.store.statistics()
        return RouterGauges(
            queued_requests=_NO_QUEUE | {str(priority): count for priority, count in waiting.by_priority.items()},
            oldest_queued_s=_NO_QUEUE | {str(priority): now - at for priority, at in waiting.oldest_arrived_at.items()},
            queued_prompt_tokens=waiting.tokens,
            running_requests=self.routes.seats(),
            open_tickets=self.admission.tickets(),
            open_streams=self.routes.streams(),
            kept_streams=kept_streams,
            kept_bytes=kept_bytes,
            members={role.value: members[f"{role.value}_usable"] + members[f"{role.value}_stale"] for role in Role},
            stale_members={role.value: members[f"{role.value}_stale"] for role in Role},
            leases=float(self.upkeep.holds_lease),
            prefix_hints={role.value: float(len(hints)) for role, hints in self.members.hints.items()},
            store_available=float(stored.available),
            unwritten_ends=len(self.unwritten),
            offered_requests=waiting.offered,
            offered_prompt_tokens=waiting.offered_tokens,
            ready_prompt_tokens=self.admission.ready_tokens(),
            lease_lapses=stored.lease_lapses,
            store_forgets=stored.forgets,
        )

    def _look(self) -> None:
        """A member changed. (Members start before the first request, the admission is there by then.)"""
        self.admission.look()


async def _sight(gate: Gate, context: Any) -> str | None:
    """Whose requests a caller may see: a tenant its own, operators and processes of the cell everybody's."""
    caller = await gate.client(context)
    return None if caller.operator else caller.tenant


def _observer(metrics: RouterMetrics) -> Callable[[str, float, bool], None]:
    """Times and errors of the store's calls; those without a label of their own count as lease or get."""

    def observe(call: str, seconds: float, failed: bool) -> None:
        label = call if call in STORE_CALLS else _STORE_LABELS.get(call, "get")
        metrics.store_latency.observe(seconds, label)
        if failed:
            metrics.store_errors.inc(1, label)

    return observe


#: Calls of upkeep, by the label under which they are counted.
_STORE_LABELS = {
    "heartbeat": "lease",
    "leave": "lease",
    "owner": "get",
    "reap": "adopt",
    "adopt": "adopt",
    "assert_live": "advance",
    "wait_ended": "get",
}

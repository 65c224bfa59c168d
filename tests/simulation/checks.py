"""What must hold in every world: after each turn of an engine, each write between memories, each look around, and at rest."""

from collections.abc import Callable
from typing import Any

import grpc

from kv_transfer.grant_states import ReaderState
from kv_transfer.plan import Notice
from kv_transfer.ports import Push
from tandem.v1 import inference_pb2 as pb
from tests.simulation.cell import Cell, Host
from tests.simulation.client_plans import OVERALL_S, Behaviour
from tests.simulation.clients import Clients, Seen
from tests.simulation.loop import BEGIN_S, BEGIN_WALL_S
from tests.simulation.scenario import SEND_TIMEOUT_S, FaultKind, Scenario
from tests.simulation.tenants import CONCURRENCY, may_be_refused, over_budget
from tests.simulation.wires import WINDOW_BYTES

#: Seconds from a cancel's answer, and from the end of a clock, to the end of the call, when nothing goes wrong.
CALM_S = 1.5
#: The same when something does: leases, keepalives and drains have their time.
ROUGH_S = 75.0
#: Seconds for which routers may be away, all together, before a seat that they have left is given up.
SEATS_WAIT_S = 10.0

ENDED = (pb.REQUEST_STATE_FINISHED, pb.REQUEST_STATE_CANCELLED, pb.REQUEST_STATE_FAILED)
#: Books that are sizes, not holdings.
_SIZES = frozenset({"pages_total", "pages_free", "pages_cached"})
_PATHS = frozenset({FaultKind.KILL, FaultKind.FREEZE, FaultKind.CUT, FaultKind.BREAK, FaultKind.DRAIN, FaultKind.LATE_WRITE})
_WIRES = _PATHS | {FaultKind.SLOW_WIRE, FaultKind.WRITES_FAIL}
_STORES = frozenset({FaultKind.STORE_AWAY, FaultKind.STORE_EMPTY, FaultKind.CUT, FaultKind.CLOCK, FaultKind.LATE_WRITE})
#: What must have gone wrong before a request may end with a cause.
_NEEDS = {
    "decode_lost": _PATHS,
    "prefill_lost": _WIRES,
    "handover_failed": _WIRES,
    "prefill_failed": _WIRES,
    "attempts_exhausted": _WIRES,
    "router_lost": _STORES | {FaultKind.KILL, FaultKind.FREEZE, FaultKind.DRAIN},
    "store_lost": _STORES,
    "shutting_down": frozenset({FaultKind.DRAIN}),
}
#: What may let a client be told another end than its record has.
_UNSTABLE = (_STORES - {FaultKind.CLOCK}) | {FaultKind.KILL, FaultKind.FREEZE}
#: Refusals that need no fault: no room now.
_NO_ROOM = frozenset({"QUEUE_FULL", "QUEUE_TOKENS_FULL", "TENANT_QUEUE_FULL", "QUEUE_WAIT"})


class Checks:
    """Collects faults as sentences; `note` puts them into the history too."""

    def __init__(self, scenario: Scenario, note: Callable[[str, str], None]) -> None:
        self.faults: list[str] = []
        self._scenario = scenario
        self._note = note
        self.cell: Cell | None = None

    def found(self, fault: str) -> None:
        """Something is wrong; the first ones are kept."""
        if len(self.faults) < 10 and fault not in self.faults:
            self.faults.append(fault)
            self._note("", f"WRONG: {fault}")

    def after_turn(self, host: Host, worker: Any) -> None:
        """The books of an engine balance between any two steps."""
        for fault in worker._scheduler.check():
            self.found(f"{host.name}: {fault}")

    def may_write(self, agent: str, push: Push, notice: Notice) -> str | None:
        """Whether a hand-over may write where it writes: its grant is open at the reader and names the place."""
        assert self.cell is not None
        host = self.cell.fabric.host_of(agent)
        if host is None or host.engine is None or host.dead:
            return f"a write to {agent}, which is gone"
        handovers = host.engine.worker._scheduler.handovers
        state = handovers.book.state(notice.grant_id)
        if state not in (ReaderState.OFFERED, ReaderState.REVOKING, ReaderState.QUARANTINED):
            return f"a write for grant {notice.grant_id} reached {host.name}, where it is {state}"
        entry = handovers._entries[notice.grant_id]
        slab = host.runner.slabs[0]
        granted = {page.page_id for pages in entry.pages for page in pages}
        for one in push.ranges:
            place = one.remote_address - slab.address
            if 0 <= place < slab.size_bytes:
                last = (place + one.size_bytes - 1) // slab.unit_bytes
                strange = set(range(place // slab.unit_bytes, last + 1)) - granted
                if strange:
                    return f"grant {notice.grant_id} wrote into pages {sorted(strange)} of {host.name} that are not its own"
        return None

    def look(self) -> None:
        """Bounds, now and then."""
        assert self.cell is not None
        for host in self.cell.living("router"):
            parts = host.application._parts
            if parts is None:
                continue
            for route in parts.routes._routes.values():
                bounds = parts.routes.cell.limits.log
                stream, limit = route.stream, max(bounds.buffer_bytes, bounds.replay_bytes // 2)
                if stream.unsent_bytes > limit + 4096:
                    self.found(f"{host.name} holds {stream.unsent_bytes} bytes for one client; the limit is {limit}")
        # A store that has forgotten what is held, or was not asked, lets in more.
        if not {fault.kind for fault in self._scenario.faults} & _STORES:
            for fault in over_budget(self.cell):
                self.found(fault)
        for fault in self.cell.faults:
            self.found(fault)
        for fault in self.cell.fabric.trespasses:
            self.found(fault)

    # at rest

    async def holdings(self) -> list[str]:
        """What is still held anywhere, and what does not add up; empty at rest."""
        assert self.cell is not None
        found = []
        for host in [host for kind in ("router", "prefill", "decode") for host in self.cell.living(kind)]:
            task = self.cell.loop.create_task(host.application.check(), context=host.context.copy())
            books = await task
            held = {name: count for name, count in books.books.items() if count and name not in _SIZES}
            if held:
                found.append(f"{host.name} holds {held}")
            found += [f"{host.name}: {fault}" for fault in books.faults]
        return found

    def requests(self, clients: Clients) -> None:
        """How requests ended, against what happened to them."""
        for seen in clients.seen.values():
            if not seen.left:
                self._end(seen)
            self._record(seen)
            self._in_time(seen)

    def _end(self, seen: Seen) -> None:
        name = seen.plan.request_id
        if seen.completed is None:
            if self._scenario.calm and not self._refusal_is_right(seen):
                self.found(f"{name} was refused with {seen.status} {seen.reason} though nothing was wrong")
            return
        cause, state = seen.completed.cause, seen.completed.state
        if cause in ("model_failed", "bad_utf8"):
            self.found(f"{name} failed with {cause}")
        self._cause(seen)
        usage = seen.completed.usage
        if not usage.cached_prompt_tokens <= usage.prompt_tokens:
            self.found(f"{name} had {usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens in caches")
        wanted = bool(seen.plan.cancels) or seen.went or seen.plan.overall_s is not None or seen.plan.timeout_s is not None
        slow = cause in ("inter_token_network", "inter_token_backpressure", "slow_consumer")
        if self._scenario.calm and state != pb.REQUEST_STATE_FINISHED and not wanted and not slow:
            self.found(f"{name} ended {pb.RequestState.Name(state)} {cause} though nothing was wrong")
        cancels = seen.plan.cancels or seen.plan.choice_cancels
        if state == pb.REQUEST_STATE_CANCELLED and not cancels and not (seen.went or seen.calls > 1):
            self.found(f"{name} was cancelled and nobody cancelled it")

    def _cause(self, seen: Seen) -> None:
        """An ending has what it says it has: clocks do not run out early, members are not lost without a fault."""
        name, cause, plan = seen.plan.request_id, seen.completed.cause, seen.plan
        kinds = {fault.kind for fault in self._scenario.faults}
        clock = plan.overall_s or OVERALL_S
        if (
            cause in ("overall_deadline", "queue_deadline", "first_token_deadline")
            and seen.ended_at - seen.sent_at < clock - 0.01
        ):
            self.found(f"{name} ended with {cause} after {seen.ended_at - seen.sent_at:.3f} s; its clock is {clock} s")
        blamed = _NEEDS.get(cause)
        if blamed is not None and not kinds & blamed:
            self.found(f"{name} ended with {cause}, which nothing that happened explains")
        if cause == "router_lost" and seen.tokens and not seen.went and self._only_routers_fail():
            self.found(f"{name} had a seat, and was lost with its router")
        if not seen.completed.HasField("usage") and not kinds & _NEEDS["router_lost"]:
            self.found(f"{name} ended without counts, though no router was lost")
        early = [one for one in seen.cancels if one.answer is not None and one.answered_at < seen.sent_at]
        if kinds & {FaultKind.STORE_AWAY, FaultKind.CUT}:
            # A router that serves without the store knows of the cancels that it has accepted itself, since its start.
            restarted = kinds & {FaultKind.KILL, FaultKind.DRAIN}
            early = [one for one in early if one.router == plan.router and not restarted]
        forgets = kinds & {FaultKind.STORE_EMPTY, FaultKind.CLOCK}
        if early and seen.completed.state != pb.REQUEST_STATE_CANCELLED and not forgets:
            self.found(f"{name} was cancelled before it came and ran all the same")

    def _only_routers_fail(self) -> bool:
        """Whether nothing but routers and their connections to clients fails, for less than a seat is held with the time that it
        takes to see that a router is gone."""
        ends = {FaultKind.KILL, FaultKind.FREEZE, FaultKind.DRAIN, FaultKind.CUT, FaultKind.BREAK}
        faults = self._scenario.faults
        names = {name for fault in faults for name in fault.names}
        of_routers = all(fault.kind in ends for fault in faults) and all(
            name.startswith(("router-", "clients")) for name in names
        )
        return of_routers and sum(fault.lasts_s for fault in faults) < SEATS_WAIT_S

    def _refusal_is_right(self, seen: Seen) -> bool:
        if seen.plan.timeout_s is not None and seen.status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return True
        if seen.calls > 1 and seen.reason == "REPLAY_GONE":
            return True
        if seen.reason == "SLOW_CONSUMER":
            return seen.plan.behaviour is Behaviour.SLOW and self._was_too_slow(seen)
        if seen.reason in (CONCURRENCY, "TENANT_QUEUE_FULL") and seen.plan.tenant:
            return may_be_refused(seen.plan, self._scenario.clients, self._scenario.shape, seen.reason)
        return seen.reason in _NO_ROOM

    @staticmethod
    def _was_too_slow(seen: Seen) -> bool:
        """Whether a client's window was still full when its time for the rest of the stream was over.

        The router can write as long as the window has room, so a call that it ended in time leaves a full window to be taken
        after that. It counts the time from when the end is stored, which is not before the record's last change.
        """
        if seen.record is None:
            return False
        ended_at = seen.record.transitions[-1].at.ToNanoseconds() / 1e9 - BEGIN_WALL_S + BEGIN_S
        due_at = max(ended_at, seen.back_at) + SEND_TIMEOUT_S
        return sum(size for at, size in seen.taken if at >= due_at) >= WINDOW_BYTES

    def _record(self, seen: Seen) -> None:
        """The stored record has ended, and as its client was told."""
        name, record = seen.plan.request_id, seen.record
        kinds = {fault.kind for fault in self._scenario.faults}
        if record is None:
            return
        if record.state not in ENDED:
            self.found(f"{name} is {pb.RequestState.Name(record.state)} in the store though nobody runs it")
        told = seen.completed
        stable = not kinds & _UNSTABLE
        if told is not None and stable and (told.state, told.finish_reason) != (record.state, record.finish_reason):
            self.found(
                f"{name} was told {told.state} {told.finish_reason}, its record says {record.state} {record.finish_reason}"
            )

    def _in_time(self, seen: Seen) -> None:
        """Cancels and deadlines take effect within a bound."""
        bound = CALM_S if self._scenario.calm else ROUGH_S
        pause = seen.plan.pause_s * 60 if seen.plan.behaviour.value == "slow" else 0.0
        # While a client is away its request ends without it; it hears so within the same bound of its return.
        accepted = [one.answered_at for one in seen.cancels if one.answer is not None]
        if accepted and seen.ended_at and seen.ended_at > max(min(accepted), seen.sent_at, seen.back_at) + bound + pause:
            self.found(f"{seen.plan.request_id} ended {seen.ended_at - min(accepted):.2f} s after its cancel was answered")
        # A cancel waits for a request that was refused before it, and is to come again.
        at_once = self._scenario.calm and not seen.refused
        if at_once and seen.record is not None and seen.record.HasField("cancel_effective_at"):
            asked_at, effective_at = seen.record.cancel_requested_at, seen.record.cancel_effective_at
            took_s = (effective_at.ToNanoseconds() - asked_at.ToNanoseconds()) / 1e9
            if took_s > bound + pause:
                self.found(f"{seen.plan.request_id} was cancelled {took_s:.2f} s before that had an effect")
        due_at = max(seen.sent_at + (seen.plan.overall_s or 0.0), seen.back_at)
        if seen.plan.overall_s is not None and seen.ended_at > due_at + bound + pause:
            self.found(f"{seen.plan.request_id} ended {seen.ended_at - seen.sent_at:.2f} s after it was sent")
        for cancel in seen.cancels:
            if cancel.wait and self._scenario.calm and cancel.answered_at - cancel.sent_at > bound + pause:
                self.found(f"a cancel of {seen.plan.request_id} waited {cancel.answered_at - cancel.sent_at:.2f} s")

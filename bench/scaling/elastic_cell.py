"""A simulated cell whose pools grow and shrink while it serves: members take a while to start, and drain before they go."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import accumulate

from bench.cell_simulation.cell import Attempt, Cell
from bench.cell_simulation.decode_member import DecodeMember
from bench.cell_simulation.figures import CLASS_S, Gaps
from bench.cell_simulation.prefill_member import PrefillMember
from bench.cell_simulation.service_times import ServiceTimes, StepRow
from bench.cell_simulation.settings import CellSettings
from bench.cell_simulation.trace import Arrival
from bench.scaling.signals import DecodeScrape, PrefillScrape, RouterScrape, Scrape
from router.member_facts import Role
from telemetry.buckets import INTER_TOKEN_S

#: Between two looks whether a draining member is empty, in seconds.
LOOK_S = 1.0


class Phase(Enum):
    """Where a member is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Life:
    """One member and when it came and went, in seconds of the run."""

    member: PrefillMember | DecodeMember
    phase: Phase
    came_at: float
    went_at: float | None = None


class ElasticCell(Cell):
    """`start_s`: from the wish for a member until it takes work. grouped: so many tokens of a sequence are made in one event,
    which takes as long as their steps; a long run of a large cell has too many steps to play each."""

    def __init__(self, settings: CellSettings, arrivals: Iterable[Arrival], start_s: float, grouped: int = 1) -> None:
        self._grouped = grouped
        service = _Grouped(**{one.name: getattr(settings.service, one.name) for one in fields(settings.service)}, steps=grouped)
        self._decode_settings = replace(settings, service=service)
        super().__init__(settings, (_in_groups(one, grouped) for one in arrivals))
        self._start_s = start_s
        self._lives = {Role.PREFILL: [Life(one, Phase.SERVING, 0.0) for one in self.prefill]}
        self._lives[Role.DECODE] = [Life(one, Phase.SERVING, 0.0) for one in self.decode]
        #: Sentences about members that went while somebody still needed them.
        self.faults: list[str] = []

    def wanted(self, role: Role) -> int:
        """Members that there are or will be, without those that drain."""
        return sum(one.phase in (Phase.STARTING, Phase.SERVING) for one in self._lives[role])

    def serving(self, role: Role) -> int:
        """Members that take work."""
        return sum(one.phase is Phase.SERVING for one in self._lives[role])

    def busy(self) -> bool:
        """Whether a request waits or runs, or a client will come back."""
        return bool(self.attempts) or self.away > 0 or any(len(router.turnstile.queue) for router in self.routers)

    def member_seconds(self, role: Role, first: float, last: float) -> float:
        """What the members of a pool cost between two times, starting and draining included."""
        ends = [(one.came_at, last if one.went_at is None else min(last, one.went_at)) for one in self._lives[role]]
        return sum(max(0.0, end - max(first, began)) for began, end in ends)

    def scale(self, role: Role, replicas: int) -> None:
        """Start members, or take some away: those that start first, then the newest, as a ReplicaSet does."""
        for _ in range(replicas - self.wanted(role)):
            self._start(role)
        alive = [one for one in self._lives[role] if one.phase in (Phase.STARTING, Phase.SERVING)]
        alive.sort(key=lambda one: (one.phase is Phase.SERVING, -one.came_at))
        for life in alive[: max(0, len(alive) - replicas)]:
            if life.phase is Phase.STARTING:
                life.phase, life.went_at = Phase.GONE, self.events.now
            else:
                life.phase = Phase.DRAINING
                self.pools.remove(life.member.known)
                self.events.after(LOOK_S, self._drained, life)

    def scrape(self) -> Scrape:
        """Everything that tells its metrics now: also members that drain."""
        routers = [router.turnstile for router in self.routers]
        queues = [one.queue.statistics() for one in routers]
        router = RouterScrape(
            members={role.value: self.serving(role) for role in (Role.PREFILL, Role.DECODE)},
            queued_tokens=sum(one.tokens for one in queues),
            queued_requests=sum(one.requests for one in queues),
            running_requests=sum(one.tickets for one in routers),
            offered_tokens=sum(one.offered_tokens for one in queues),
            ready_tokens=sum(one.ready_tokens for one in routers),
            inter_token=_buckets(self.gaps, self._grouped),
        )
        prefill = {one.member.peer.member: _of_prefill(one.member) for one in self._telling(Role.PREFILL)}
        decode = {one.member.peer.member: _of_decode(one.member) for one in self._telling(Role.DECODE)}
        return Scrape(self.events.now, prefill, decode, router)

    def _telling(self, role: Role) -> list[Life]:
        return [one for one in self._lives[role] if one.phase in (Phase.SERVING, Phase.DRAINING)]

    def _decode_member(self, number: int) -> DecodeMember:
        return DecodeMember(number, self._decode_settings, self.events, self.lengths, self._decode_said)

    def _start(self, role: Role) -> None:
        number = len(self._lives[role])
        member: PrefillMember | DecodeMember
        if role is Role.PREFILL:
            member = self._prefill_member(number)
            self.prefill.append(member)
            self._prefill[member.peer.member] = member
        else:
            member = self._decode_member(number)
            self.decode.append(member)
            self._decode[member.peer.member] = member
        member.news.heard = self._look
        life = Life(member, Phase.STARTING, self.events.now)
        self._lives[role].append(life)
        self.events.after(self._start_s, self._started, life)

    def _started(self, life: Life) -> None:
        if life.phase is Phase.STARTING:
            life.phase = Phase.SERVING
            life.member.known.seen_at = self.events.now
            self.pools.add(life.member.known)
            self._look()

    def _drained(self, life: Life) -> None:
        """Ends a draining member that nobody needs any more."""
        if any(life.member in (one.decode, one.prefill) and self._needs(one, life) for one in self.attempts.values()):
            self.events.after(LOOK_S, self._drained, life)
            return
        life.phase, life.went_at = Phase.GONE, self.events.now
        member = life.member
        held = member.scheduler.statistics().jobs if isinstance(member, PrefillMember) else len(member.scheduler.seats)
        if held:
            self.faults.append(f"{member.peer.member} went and held {held}")

    @staticmethod
    def _needs(attempt: Attempt, life: Life) -> bool:
        return isinstance(life.member, DecodeMember) or attempt.request.first_at < 0


@dataclass(frozen=True, slots=True)
class _Grouped(ServiceTimes):
    """Several steps of the same rows at once."""

    steps: int = 1

    def step_s(self, rows: Iterable[StepRow]) -> float:
        """All of them."""
        return self.steps * ServiceTimes.step_s(self, rows)


def _in_groups(one: Arrival, grouped: int) -> Arrival:
    return Arrival(one.at, one.prompt_tokens, -(-one.output_tokens // grouped))


def _of_prefill(member: PrefillMember) -> PrefillScrape:
    return PrefillScrape(member.scheduler.statistics().waiting_tokens, member.busy_s)


def _of_decode(member: DecodeMember) -> DecodeScrape:
    load = member.scheduler.load()
    return DecodeScrape(1 - load.free_pages / member.info.total_pages, len(member.scheduler.seats), load.running)


def _buckets(gaps: Gaps, grouped: int) -> tuple[int, ...]:
    """Cumulative counts of the router's buckets, from finer classes of the times of groups."""
    sums = list(accumulate(gaps.counts))
    edges = (min(round(bound * grouped / CLASS_S), len(sums)) for bound in INTER_TOKEN_S)
    return (*(sums[edge - 1] for edge in edges), sums[-1])

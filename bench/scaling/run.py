"""One run of an elastic cell under its autoscalers, and what it came to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.cell_simulation.cell import REFUSED, REST_S
from bench.cell_simulation.figures import Request
from bench.cell_simulation.settings import CellSettings, Targets
from bench.cell_simulation.trace import Arrival
from bench.scaling.elastic_cell import ElasticCell
from bench.scaling.hpa import Autoscaler
from bench.scaling.plan import Order, Plan
from bench.scaling.signals import Scrape, signals
from router.member_facts import Role
from tandem_cli.load.measured import quantile

POOLS = (Role.PREFILL, Role.DECODE)
#: Requests of so many seconds are judged together when a recovery is looked for.
SLICE_S = 60.0
#: Share of the requests that have to be served well.
GOOD = 0.95


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a cell: requests, how many tokens make one event, from when on requests are counted (seconds)."""

    arrivals: Sequence[Arrival]
    grouped: int = 1
    counted_from: float = 0.0


@dataclass(frozen=True, slots=True)
class Blackout:
    """Prometheus reads nothing between two times, in seconds of the run."""

    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class Scaling:
    """The autoscalers of a cell. `plan` None: the pools stay as they are. `changes`: when, which pool, from and to how many."""

    cell: ElasticCell
    plan: Plan | None
    until: float
    blackout: Blackout = field(default_factory=Blackout)
    changes: list[tuple[float, Role, int, int]] = field(default_factory=list)
    history: list[Scrape] = field(default_factory=list)
    _autoscalers: dict[Role, Autoscaler] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to scrape and to decide."""
        if self.plan is not None:
            self._autoscalers = {role: self.plan.autoscaler(role) for role in POOLS}
            self.cell.events.after(0.0, self._scrape)
            self.cell.events.after(self.plan.sync_s + 1.0, self._sync)
            if self.plan.order is not None:
                self.cell.events.at(self.plan.order.at, self._ordered, self.plan.order)

    def _ordered(self, order: Order) -> None:
        for role in POOLS:
            current = self.cell.wanted(role)
            self._scale(role, current, self._autoscalers[role].order(order.at, current, order.size(role)))

    def _scale(self, role: Role, current: int, replicas: int) -> None:
        if replicas != current:
            self.changes.append((self.cell.events.now, role, current, replicas))
            self.cell.scale(role, replicas)

    def _scrape(self) -> None:
        assert self.plan is not None
        now = self.cell.events.now
        dark = self.blackout.first <= now < self.blackout.last
        self.history.append(Scrape(now) if dark else self.cell.scrape())
        del self.history[: -int(max(self.plan.window.seconds, self.plan.window.cost_seconds) / self.plan.scrape_s) - 2]
        if now < self.until:
            self.cell.events.after(self.plan.scrape_s, self._scrape)

    def _sync(self) -> None:
        assert self.plan is not None
        now, found = self.cell.events.now, signals(self.history, self.plan.window)
        for role in POOLS:
            current = self.cell.wanted(role)
            decision = self._autoscalers[role].decide(now, current, self.plan.readings(role, found), self.cell.serving(role))
            self._scale(role, current, decision.replicas)
        if now < self.until:
            self.cell.events.after(self.plan.sync_s, self._sync)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Shares from 0 to 1 of the requests that first came after `counted_from`; seconds; hours of members from then on.
    `returned`: were served after they had been refused and came back, `later_p50_s` and `later_p99_s` after they first came.
    `refused`: as they came, and their clients gave up. `failed`: after they had waited. `refusals`: how often one was refused.
    `slices`: the share that was served well, of each SLICE_S from the start of the run."""

    requests: int
    attainment: float
    returned: int
    later_p50_s: float
    later_p99_s: float
    refusals: int
    refused: int
    failed: int
    lost: int
    ttft_p50_s: float
    ttft_p99_s: float
    member_hours: dict[str, float]
    changes: tuple[tuple[float, str, int, int], ...]
    slices: tuple[float, ...]
    faults: tuple[str, ...]

    @property
    def not_served(self) -> int:
        """Requests whose clients got no answer."""
        return self.refused + self.failed + self.lost

    def changes_after(self, at: float, until: float = float("inf")) -> int:
        """How often a pool's size was changed."""
        return sum(at <= when < until for when, *_ in self.changes)

    def good_again(self, since: float) -> float | None:
        """Seconds from `since` until the end of the last slice that was not served well; None when it was the last of all."""
        bad = [number for number, share in enumerate(self.slices) if share < GOOD and (number + 1) * SLICE_S > since]
        if bad and bad[-1] == len(self.slices) - 1:
            return None
        return (bad[-1] + 1) * SLICE_S - since if bad else 0.0


def run(settings: CellSettings, load: Load, plan: Plan | None, blackout: Blackout | None = None) -> Outcome:
    """Serve all requests to their ends. Sizes in `settings` are those at the start."""
    targets = replace(settings.targets, inter_token_s=settings.targets.inter_token_s * load.grouped)
    settings, counted_from = replace(settings, targets=targets), load.counted_from
    cell = ElasticCell(settings, load.arrivals, plan.start_s if plan is not None else 0.0, load.grouped)
    span = cell.requests[-1].arrived_at
    scaling = Scaling(cell, plan, span, blackout or Blackout())
    scaling.start()
    cell.events.run(span)
    hours = {role.value: cell.member_seconds(role, counted_from, span) / 3600 for role in POOLS}
    until = span + 1.0  # the last request comes at `span`
    cell.events.run(until)
    while cell.busy() and until < span + REST_S:
        until += 1.0
        cell.events.run(until)
    counted = [one for one in cell.requests if one.arrived_at >= counted_from]
    ttft = [one.first_at - one.arrived_at for one in counted if one.first_at >= 0]
    later = [one.came_at - one.arrived_at for one in counted if one.done and one.tries > 1]
    return Outcome(
        requests=len(counted),
        attainment=_served_well(counted, settings.targets),
        returned=len(later),
        later_p50_s=quantile(later, 0.5),
        later_p99_s=quantile(later, 0.99),
        refusals=sum(one.tries - (one.failure != REFUSED) for one in counted),
        refused=sum(one.failure == REFUSED for one in counted),
        failed=sum(bool(one.failure) and one.failure != REFUSED for one in counted),
        lost=sum(not one.done and not one.failure for one in cell.requests),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        member_hours=hours,
        changes=tuple((at, role.value, before, after) for at, role, before, after in scaling.changes),
        slices=tuple(_slices(cell.requests, settings.targets, span)),
        faults=(*cell.faults, *cell.check()),
    )


def _served_well(requests: Sequence[Request], targets: Targets) -> float:
    return sum(all(one.met(targets)) for one in requests) / max(1, len(requests))


def _slices(requests: Sequence[Request], targets: Targets, span: float) -> list[float]:
    parts: list[list[Request]] = [[] for _ in range(int(span / SLICE_S) + 1)]
    for one in requests:
        parts[int(one.arrived_at / SLICE_S)].append(one)
    return [_served_well(part, targets) if part else 1.0 for part in parts]

"""How the pools of a simulated cell are scaled: targets, bounds, behaviour, and the times of what stands around them."""

from dataclasses import dataclass, field

from bench.scaling.hpa import Autoscaler, Behaviour, Bounds, Policy, Reading, Rules, Unit
from bench.scaling.signals import Window
from router.member_facts import Role


def behaviour(
    window_s: float = 300.0,
    down_percent: int = 10,
    down_period_s: float = 60.0,
    up_period_s: float = 120.0,
    up_percent: int = 300,
) -> Behaviour:
    """The chart's defaults: up at once, by at most `up_percent` in `up_period_s` (4 pods are always allowed); down to the most
    that was wanted in `window_s`, by at most `down_percent` or one pod in `down_period_s`."""
    up = Rules((Policy(Unit.PERCENT, up_percent, up_period_s), Policy(Unit.PODS, 4, up_period_s)), 0)
    down = Rules((Policy(Unit.PERCENT, down_percent, down_period_s), Policy(Unit.PODS, 1, down_period_s)), window_s)
    return Behaviour(up, down)


@dataclass(frozen=True, slots=True)
class Targets:
    """What one member may have of each number of charts/tandem/scaling/queries.yaml. None: not asked for."""

    backlog: float | None
    busy: float | None = 0.7
    offered: float | None = 0.7
    kv: float | None = 0.7
    offered_kv: float | None = 0.7
    sequences: float | None = None
    inter_token: float | None = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """Sizes that somebody who knows what comes asks for at a time of the run."""

    at: float
    prefill: int
    decode: int

    def size(self, role: Role) -> int:
        """Of a pool."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to scale. `scrape_s`: between two scrapes; `sync_s`: between two decisions; `start_s`: until a new member works.
    `order`: beside what is decided."""

    targets: Targets
    prefill: Bounds
    decode: Bounds
    behaviour: Behaviour = field(default_factory=behaviour)
    window: Window = field(default_factory=Window)
    scrape_s: float = 15.0
    sync_s: float = 15.0
    start_s: float = 60.0
    order: Order | None = None

    def readings(self, role: Role, found: dict[str, float | None]) -> list[Reading]:
        """What the autoscaler of a pool is told."""
        one = self.targets
        targets = {"prefill.backlog": one.backlog, "prefill.busy": one.busy, "decode.kv": one.kv}
        targets |= {"prefill.offered": one.offered, "decode.offered": one.offered_kv}
        targets |= {"decode.sequences": one.sequences, "decode.interToken": one.inter_token}
        mine = {name: target for name, target in targets.items() if target is not None and name.startswith(role.value)}
        return [Reading(name, found[name], target) for name, target in mine.items()]

    def autoscaler(self, role: Role) -> Autoscaler:
        """A new one for a pool."""
        return Autoscaler(self.prefill if role is Role.PREFILL else self.decode, self.behaviour)

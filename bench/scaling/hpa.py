"""What a HorizontalPodAutoscaler (autoscaling/v2) decides. Pure: time and readings come in, a number of replicas goes out.

Source: "Horizontal Pod Autoscaling" of the Kubernetes documentation (algorithm, behaviour, missing metrics and unready pods), and
for the order of stabilisation, rates and bounds the controller that it describes.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

#: Seconds between two decisions of the controller, unless a cluster says otherwise.
SYNC_S = 15.0
#: A usage this close to its target changes nothing.
TOLERANCE = 0.1


class Kind(Enum):
    """How a number is compared with its target."""

    AVERAGE_VALUE = "AverageValue"
    """The number is a total; the target is what one replica may have of it."""
    VALUE = "Value"
    """The number itself has the target; replicas are assumed to lower it in proportion."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One external metric now. `value` None: it could not be read."""

    name: str
    value: float | None
    target: float
    kind: Kind = Kind.AVERAGE_VALUE


@dataclass(frozen=True, slots=True)
class PodReadings:
    """One metric of each pod (type Pods). `unready` pods count as idle when the pool would grow, and are left out when it would
    shrink; `missing` ones have no number and are taken as idle or as at their target, whichever changes less."""

    name: str
    values: Mapping[str, float]
    target: float
    unready: Collection[str] = ()
    missing: Collection[str] = ()


class Unit(Enum):
    """What a policy counts in."""

    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True)
class Policy:
    """At most so many pods, or so many percent of them, in `period_s` seconds."""

    unit: Unit
    value: int
    period_s: float


class Select(Enum):
    """Which of several policies counts."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


@dataclass(frozen=True, slots=True)
class Rules:
    """One direction. `window_s`: the most careful recommendation of so many seconds is followed."""

    policies: Sequence[Policy]
    window_s: float
    select: Select = Select.MAX
    tolerance: float = TOLERANCE


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Both directions; the defaults are those of Kubernetes."""

    up: Rules = Rules((Policy(Unit.PERCENT, 100, 15), Policy(Unit.PODS, 4, 15)), 0)
    down: Rules = Rules((Policy(Unit.PERCENT, 100, 15),), 300)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most replicas."""

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`replicas` to have from now on; what the metrics asked for, None where that is not known; names of those that failed."""

    replicas: int
    wanted: int | None
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class Autoscaler:
    """One HPA. It remembers what it recommended and what it changed, as the controller does."""

    bounds: Bounds
    behaviour: Behaviour = field(default_factory=Behaviour)
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def decide(self, now: float, current: int, readings: Sequence[Reading | PodReadings], ready: int | None = None) -> Decision:
        """`current`: replicas wanted so far; `ready`: how many of them are, all when None. `now` in seconds, rising."""
        bounds = self.bounds
        if not self._recommended:
            self._recommended.append((now, current))  # a controller that starts takes what it finds for what was wanted
        if current == 0 and bounds.fewest > 0:
            return Decision(0, None)  # scaling is off
        if current > bounds.most or current < bounds.fewest:
            return self._change(now, current, Decision(min(bounds.most, max(bounds.fewest, current)), None))
        wanted: int | None = None
        failed = []
        for reading in readings:
            proposal = proposed(reading, current, current if ready is None else ready, self.behaviour)
            if proposal is None:
                failed.append(reading.name)
            else:
                wanted = proposal if wanted is None else max(wanted, proposal)
        if wanted is None or (failed and wanted < current):
            return Decision(current, None, tuple(failed))
        steady = self._stabilised(now, current, wanted)
        return self._change(now, current, Decision(self._limited(now, current, steady), wanted, tuple(failed)))

    def order(self, now: float, current: int, replicas: int) -> int:
        """Replicas after somebody who knew has asked for at least so many, as if metrics had: it counts for the windows."""
        self._recommended.append((now, replicas))
        return self._change(now, current, Decision(max(current, replicas), replicas)).replicas

    def _stabilised(self, now: float, current: int, wanted: int) -> int:
        lowest = highest = wanted
        for at, replicas in self._recommended:
            if at > now - self.behaviour.up.window_s:
                lowest = min(lowest, replicas)
            if at > now - self.behaviour.down.window_s:
                highest = max(highest, replicas)
        longest_s = max(self.behaviour.up.window_s, self.behaviour.down.window_s)
        self._recommended = [(at, replicas) for at, replicas in self._recommended if at > now - longest_s]
        self._recommended.append((now, wanted))
        return min(max(current, lowest), highest)

    def _limited(self, now: float, current: int, wanted: int) -> int:
        bounds = self.bounds
        if wanted > current:
            limit = max(current, self._limit(now, current, self.behaviour.up, 1))
            return min(wanted, limit, bounds.most)
        if wanted < current:
            limit = min(current, self._limit(now, current, self.behaviour.down, -1))
            return max(wanted, limit, bounds.fewest)
        return current

    def _limit(self, now: float, current: int, rules: Rules, sign: int) -> int:
        """Farthest number of replicas in one direction now; `sign` is 1 for up."""
        if rules.select is Select.DISABLED:
            return current
        limits = []
        for policy in rules.policies:
            began = current - sum(count for at, count in self._changes if at > now - policy.period_s)
            step = policy.value if policy.unit is Unit.PODS else began * policy.value / 100
            limits.append(math.ceil(began + step) if sign > 0 else int(began - step))
        farthest, nearest = (max, min) if sign > 0 else (min, max)
        return farthest(limits) if rules.select is Select.MAX else nearest(limits)

    def _change(self, now: float, current: int, decision: Decision) -> Decision:
        rules = (*self.behaviour.up.policies, *self.behaviour.down.policies)
        oldest = now - max((policy.period_s for policy in rules), default=0.0)
        self._changes = [(at, count) for at, count in self._changes if at > oldest]
        if decision.replicas != current:
            self._changes.append((now, decision.replicas - current))
        return decision


def proposed(reading: Reading | PodReadings, current: int, ready: int, behaviour: Behaviour) -> int | None:
    """Replicas that one metric asks for; None when it could not be read."""
    if isinstance(reading, PodReadings):
        return _of_pods(reading, current, behaviour)
    if reading.value is None:
        return None
    if reading.kind is Kind.AVERAGE_VALUE:
        if current and _near(reading.value / (reading.target * current), behaviour):
            return current
        return math.ceil(reading.value / reading.target)
    ratio = reading.value / reading.target
    if current == 0:
        return math.ceil(ratio)
    return current if _near(ratio, behaviour) else math.ceil(ratio * ready)


def _near(ratio: float, behaviour: Behaviour) -> bool:
    return 1.0 - behaviour.down.tolerance <= ratio <= 1.0 + behaviour.up.tolerance


def _of_pods(reading: PodReadings, current: int, behaviour: Behaviour) -> int | None:
    """Of a metric of each pod: pods without a number are filled in against the direction, unready ones when it is up."""
    values = {pod: value for pod, value in reading.values.items() if pod not in reading.unready and pod not in reading.missing}
    if not values:
        return None
    ratio = sum(values.values()) / len(values) / reading.target
    grows = ratio > 1.0
    if not reading.missing and not (grows and reading.unready):
        return current if _near(ratio, behaviour) else math.ceil(ratio * len(values))
    filled = dict(values)
    if ratio < 1.0:
        filled.update(dict.fromkeys(reading.missing, reading.target))
    elif grows:
        filled.update(dict.fromkeys((*reading.missing, *reading.unready), 0.0))
    again = sum(filled.values()) / len(filled) / reading.target
    if _near(again, behaviour) or (again > 1.0) is not grows:
        return current
    replicas = math.ceil(again * len(filled))
    turned = replicas < current if again > 1.0 else replicas > current
    return current if turned else replicas

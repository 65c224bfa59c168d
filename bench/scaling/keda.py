"""What KEDA adds to the HPA that it makes: activation, the way to and from zero, and what it says while a trigger fails. Pure.

Source: KEDA's documentation of ScaledObjects (fallback, cooldownPeriod, activation) and of the Prometheus trigger
(ignoreNullValues).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.scaling.hpa import Autoscaler, Decision, Reading


@dataclass(frozen=True, slots=True)
class Trigger:
    """One Prometheus trigger of type AverageValue. `activation`: above it the pool may not be empty. `ignore_null`: a query
    without an answer reads 0, which is KEDA's default and shrinks a pool when its metrics are lost."""

    name: str
    threshold: float
    activation: float = 0.0
    ignore_null: bool = False


@dataclass(frozen=True, slots=True)
class Fallback:
    """After more than `failures` failures in a row a trigger asks for the replicas that there are, or for `replicas` if those are
    more (behaviour currentReplicasIfHigher)."""

    failures: int
    replicas: int


@dataclass(slots=True)
class ScaledObject:
    """One ScaledObject over one HPA. `fewest` may be 0; the HPA's own floor is then 1."""

    autoscaler: Autoscaler
    triggers: Sequence[Trigger]
    fallback: Fallback
    fewest: int
    cooldown_s: float = 300.0
    _failures: dict[str, int] = field(default_factory=dict)
    _active_at: float | None = None

    def decide(self, now: float, current: int, values: Mapping[str, float | None]) -> Decision:
        """Replicas to have from now on; `values` by trigger, None or absent where the query had no answer."""
        read = {one.name: self._value(one, values.get(one.name)) for one in self.triggers}
        failed = tuple(name for name, value in read.items() if value is None)
        active = any(value is not None and value > one.activation for one in self.triggers for value in [read[one.name]])
        if self._active_at is None or active:
            self._active_at = now
        if current == 0:
            # A fallback does not start an empty pool: it has nobody to count.
            return Decision(max(1, self.fewest) if active else 0, None, failed)
        if self.fewest == 0 and not active and not failed and now - self._active_at >= self.cooldown_s:
            return Decision(0, None)
        return self.autoscaler.decide(now, current, [self._reading(one, read[one.name], current) for one in self.triggers])

    def _value(self, trigger: Trigger, value: float | None) -> float | None:
        value = 0.0 if value is None and trigger.ignore_null else value
        self._failures[trigger.name] = 0 if value is not None else self._failures.get(trigger.name, 0) + 1
        return value

    def _reading(self, trigger: Trigger, value: float | None, current: int) -> Reading:
        if value is None and self._failures[trigger.name] > self.fallback.failures:
            value = trigger.threshold * max(current, self.fallback.replicas)
        return Reading(trigger.name, value, trigger.threshold)

"""One registry of metrics for each process, and metrics whose updates never raise.

A wrong update (a negative count, a value that is not a number, an unknown label) is a bug in the caller: it is counted in
tandem_telemetry_errors_total and logged once, and the data path goes on. It is never clamped into something plausible.
"""

import logging
import math
import numbers
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.tracing import is_sampled, trace_id_of

#: Most combinations of open label values of one metric; those beyond it are counted under OTHER.
MAX_CHILDREN = 200
#: Label value that stands for all that have none of their own.
OTHER = "other"

_LOG = logging.getLogger("telemetry.registry")

#: Names of labels, each with its closed list of values, or None when the values are open (a member's name).
Labels = Mapping[str, Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Computed:
    """A metric that is computed when scraped. `counter` is for counts that never fall, kept elsewhere."""

    name: str
    help: str
    label: str | None = None
    counter: bool = False


#: What a provider answers: for each metric's name a value, or a value for each value of its label.
Samples = Mapping[str, float | Mapping[str, float]]


class MetricsRegistry:
    """All metrics of one process. Names get the prefix `tandem_`."""

    def __init__(self, kind: str, version: str, incarnation: str = "") -> None:
        # A second series with the time of creation would double what histograms cost.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        prometheus_client.ProcessCollector(registry=self.registry)
        self._told: set[tuple[str, str]] = set()
        self._errors = prometheus_client.Counter(
            "tandem_telemetry_errors_total",
            "Wrong updates of metrics, by metric and reason.",
            ("metric", "reason"),
            registry=self.registry,
        )
        prometheus_client.Info("tandem_build", "What runs here.", registry=self.registry).info(
            {"version": version, "kind": kind, "python": platform.python_version(), "incarnation": incarnation}
        )
        prometheus_client.Gauge(
            "tandem_incarnation_start_timestamp_seconds", "When this process started.", registry=self.registry
        ).set(time.time())

    def counter(self, name: str, text: str, labels: Labels | None = None) -> "Counter":
        """Declare a counter; `name` ends in `_total`. Closed label values show 0 from the start."""
        names = tuple(labels or {})
        made = prometheus_client.Counter(f"tandem_{name}", text, names, registry=self.registry)
        return Counter(_Family(f"tandem_{name}", made, labels or {}, self))

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Labels | None = None) -> "Histogram":
        """Declare a histogram; `name` ends in its unit."""
        names = tuple(labels or {})
        made = prometheus_client.Histogram(f"tandem_{name}", text, names, registry=self.registry, buckets=buckets)
        return Histogram(_Family(f"tandem_{name}", made, labels or {}, self))

    def computed(self, declared: Iterable[Computed]) -> "ComputedMetrics":
        """Declare metrics that a provider computes when they are scraped. Until it is set they are absent, not 0."""
        made = ComputedMetrics(tuple(declared), self)
        self.registry.register(made)
        return made

    def error(self, metric: str, reason: str, detail: str) -> None:
        """Count a wrong update; log the first of its kind."""
        self._errors.labels(metric, reason).inc()
        if (metric, reason) not in self._told:
            self._told.add((metric, reason))
            _LOG.error("metric %s was updated wrongly (%s): %s; counted from now on, not logged again", metric, reason, detail)

    def text(self) -> str:
        """Everything in the text format, as a scrape sees it."""
        return prometheus_client.generate_latest(self.registry).decode()

    def exposed(self, accept: str) -> tuple[bytes, str]:
        """Everything in the format that an HTTP `Accept` header asks for, and that format's content type."""
        encode, kind = prometheus_client.exposition.choose_encoder(accept)
        return encode(self.registry), kind


@dataclass(slots=True)
class _Family:
    """A declared metric with its children by label values."""

    name: str
    metric: Any
    labels: Labels
    owner: MetricsRegistry
    children: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.labels:
            self.children[()] = self.metric
        elif len(self.labels) == 1:
            for value in next(iter(self.labels.values())) or ():
                self.children[(value,)] = self.metric.labels(value)

    def child(self, values: tuple[str, ...]) -> Any:
        """The child of these label values; None (and an error counted) when their number is wrong."""
        found = self.children.get(values)
        return found if found is not None else self._new_child(values)

    def _new_child(self, values: tuple[str, ...]) -> Any:
        if len(values) != len(self.labels):
            self.owner.error(self.name, "bad_label", f"{len(values)} label values for {len(self.labels)} labels")
            return None
        folded = []
        for value, (label, allowed) in zip(values, self.labels.items(), strict=True):
            if not isinstance(value, str) or (allowed is not None and value not in allowed):
                self.owner.error(self.name, "bad_label", f"{label} is {str(value)[:64]!r}, which is not in its list")
                value = OTHER
            folded.append(value)
        if tuple(folded) not in self.children and len(self.children) >= MAX_CHILDREN:
            self.owner.error(self.name, "too_many_labels", f"over {MAX_CHILDREN} combinations of label values")
            folded = [OTHER] * len(folded)
        known = self.children.get(tuple(folded))
        if known is None:
            known = self.children[tuple(folded)] = self.metric.labels(*folded)
        return known


class Declared:
    """A metric as the code that updates it holds it."""

    def __init__(self, family: _Family) -> None:
        self._family = family

    @property
    def name(self) -> str:
        """Its full name."""
        return self._family.name

    @property
    def declared_labels(self) -> Labels:
        """Its labels as they were declared."""
        return self._family.labels


class Counter(Declared):
    """Counts that only grow."""

    def inc(self, amount: float = 1, *labels: str) -> None:
        """Add `amount` under the label values, in the order of their declaration. Never raises."""
        family = self._family
        reason = _fault(amount)
        if reason:
            family.owner.error(family.name, reason, f"amount is {amount!r}")
            return
        child = family.child(labels)
        if child is not None:
            child.inc(amount)


class Histogram(Declared):
    """Distributions of values that are not negative."""

    def observe(self, value: float, *labels: str, traceparent: str | None = None) -> None:
        """Note `value`, with its trace as the exemplar when that is recorded. Never raises."""
        family = self._family
        reason = _fault(value)
        if reason:
            family.owner.error(family.name, reason, f"value is {value!r}")
            return
        child = family.child(labels)
        if child is None:
            return
        if traceparent and is_sampled(traceparent):
            child.observe(value, {"trace_id": trace_id_of(traceparent)})
        else:
            child.observe(value)


class ComputedMetrics(Collector):
    """Metrics computed from what there is, at the moment of a scrape and in the scrape's thread."""

    def __init__(self, declared: tuple[Computed, ...], owner: MetricsRegistry) -> None:
        self._declared = declared
        self._owner = owner
        self._provider: Callable[[], Samples] | None = None

    def provide(self, provider: Callable[[], Samples]) -> None:
        """Set who answers. It is called in another thread: it reads statistics, it changes nothing and waits for nothing."""
        self._provider = provider

    def describe(self) -> Iterable[Metric]:
        """The declared metrics without samples: registering must not call the provider."""
        return [self._family(one) for one in self._declared]

    def collect(self) -> Iterable[Metric]:
        """The metrics with the samples of now; those that the provider leaves out are absent."""
        samples = self._samples()
        found: list[Metric] = []
        for one in self._declared:
            if one.name not in samples:
                continue
            family = self._family(one)
            self._fill(family, one, samples[one.name])
            found.append(family)
        return found

    def _samples(self) -> Samples:
        if self._provider is None:
            return {}
        try:
            return self._provider()
        except Exception as wrong:  # noqa: BLE001  (a provider's bug costs its own samples, not the whole scrape)
            self._owner.error("computed", "provider", f"{type(wrong).__name__}: {wrong}")
            return {}

    def _fill(self, family: Any, one: Computed, value: float | Mapping[str, float]) -> None:
        pairs = value.items() if isinstance(value, Mapping) else [("", value)]
        if isinstance(value, Mapping) != (one.label is not None):
            self._owner.error(f"tandem_{one.name}", "bad_label", f"label is {one.label!r}, samples are {type(value).__name__}")
            return
        for label, sample in pairs:
            reason = _fault(sample)
            if reason:
                self._owner.error(f"tandem_{one.name}", reason, f"value is {sample!r}")
            else:
                family.add_metric([label] if one.label is not None else [], sample)

    def _family(self, one: Computed) -> Any:
        make = CounterMetricFamily if one.counter else GaugeMetricFamily
        return make(f"tandem_{one.name}", one.help, labels=[one.label] if one.label is not None else [])


class MetricsServer:
    """The port that Prometheus reads."""

    def __init__(self, registry: MetricsRegistry, host: str, port: int) -> None:
        """Listen on `host`:`port`; port 0 takes a free one. Raises OSError when it is taken."""
        self._server, self._thread = prometheus_client.start_http_server(port, host, registry.registry)
        self._server.set_app(_with_whole_names(self._server.get_app()))
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _with_whole_names(application: Any) -> Any:
    """A WSGI application that writes names as they are, also in OpenMetrics: prometheus_client 0.26 would make `vllm_` of `vllm:`
    in it. All names are of the old character set, which every escaping leaves alone but this one does right."""

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        kept = (form for form in environ.get("HTTP_ACCEPT", "").split(",") if form.strip())
        asked = (";".join(word for word in form.split(";") if not word.strip().startswith("escaping=")) for form in kept)
        environ["HTTP_ACCEPT"] = ",".join(f"{form};escaping=allow-utf-8" if "openmetrics" in form else form for form in asked)
        return application(environ, start_response)

    return answer


def _fault(value: Any) -> str:
    """Why `value` cannot be a count, a duration or a size; "" when it can."""
    kind = type(value)
    # Nearly all are floats or ints; asking an abstract class takes longer than noting the value.
    if kind is not float and kind is not int and (kind is bool or not isinstance(value, numbers.Real)):
        return "not_a_number"
    if not math.isfinite(value):
        return "not_a_number"
    return "negative" if value < 0 else ""

"""The dashboards of the chart as queries: panels with their variables put in, and a Prometheus that is asked for them."""

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "charts" / "tandem" / "dashboards"
NAMES = ("service", "prefill", "decode")
#: Longest wait for an answer, seconds.
ASK_S = 30.0
#: What Grafana puts in for a variable of which all values are chosen.
_ALL = {"namespace": ".*", "cell": ".*", "instance": ".*"}
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel and the form of its legend, with {{label}} for labels."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `kind` is Grafana's type; place and size are in Grafana's grid of 24 columns."""

    title: str
    kind: str
    unit: str
    description: str
    stacked: bool
    x: int
    y: int
    width: int
    height: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one series; times in unix seconds, absent values are not numbers."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


def read_dashboard(name: str, rate_interval: str = "1m") -> tuple[str, list[Panel]]:
    """Title and panels of one of NAMES, rows included, with all variables standing for everything."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found["title"], [_panel(one, rate_interval) for one in found["panels"]]


def filled(expression: str, rate_interval: str) -> str:
    """An expression as Grafana would send it. Raises KeyError for a variable that the dashboards do not have."""
    values = {**_ALL, "__rate_interval": rate_interval}
    return _VARIABLE.sub(lambda match: values[match[1]], expression)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """A legend with labels put in; without a form all labels."""
    if not form:
        return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if key != "__name__")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), form)


class Prometheus:
    """A Prometheus at `url`. Every call raises OSError when it does not answer, ValueError when it refuses the query."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def now(self, expression: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an expression, now or at a time in unix seconds."""
        when = {} if at_s is None else {"time": f"{at_s:.3f}"}
        data = self.ask("query", {"query": expression, **when})
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def over(self, expression: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """The series of an expression between two times in unix seconds."""
        words = {"query": expression, "start": f"{begin_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
        found = self.ask("query_range", words)["result"]
        return [_series(one) for one in found]

    def ask(self, path: str, words: Mapping[str, str] | None = None) -> Any:
        """What an address under /api/v1/ answers."""
        body = urllib.parse.urlencode(words).encode() if words else None
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", body, timeout=ASK_S) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                said = json.load(refused)
        if said["status"] != "success":
            raise ValueError(f"{said.get('errorType')}: {said.get('error')}")
        return said["data"]


def _panel(found: dict[str, Any], rate_interval: str) -> Panel:
    place = found["gridPos"]
    defaults = found.get("fieldConfig", {}).get("defaults", {})
    targets = tuple(Target(filled(one["expr"], rate_interval), one["legendFormat"]) for one in found.get("targets", ()))
    return Panel(
        title=found["title"],
        kind=found["type"],
        unit=defaults.get("unit", ""),
        description=found.get("description", ""),
        stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        targets=targets,
    )


def _series(found: dict[str, Any]) -> Series:
    pairs = [(float(at), float(value)) for at, value in found["values"]]
    return Series(found["metric"], tuple(at for at, _ in pairs), tuple(v if math.isfinite(v) else math.nan for _, v in pairs))

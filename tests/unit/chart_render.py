"""The chart as the real Helm engine renders it, and what the kubelet would make of a pod."""

import copy
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from decode_svc.config import DecodeSettings
from prefill_svc.config import PrefillSettings
from router.config import RouterSettings
from rpc.settings import load_settings

CHART = Path(__file__).resolve().parents[2] / "charts" / "tandem"
RELEASE, NAMESPACE = "demo", "llm"
ROLES = ("router", "prefill", "decode")
KINDS: dict[str, Any] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
POD_IP = {"IPv4": "10.1.2.3", "IPv6": "fd00::7"}
SECRET_URL = "rediss://cell:hunter2@store.example:6380/0"

Object = dict[str, Any]

#: Ways to use the chart, each rendered and checked as a whole: the files of charts/tandem/ci, by their names.
VALUE_SETS: dict[str, Object] = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "ci").glob("*.yaml"))}


@lru_cache(maxsize=1)
def chart() -> Chart:
    return Chart.load(CHART)


def merged(over: Object, base: Object | None = None) -> Object:
    """The chart's own values with `over` on top, as Helm merges them, but with None kept."""
    result = copy.deepcopy(chart().values if base is None else base)
    for key, value in over.items():
        result[key] = merged(value, result[key]) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
    return result


def render(values: Object) -> dict[str, str]:
    """Text of every template, by file name."""
    made = chart().render(values, name=RELEASE, namespace=NAMESPACE)
    return {path.removeprefix("tandem/templates/"): text for path, text in made.items()}


@lru_cache(maxsize=len(VALUE_SETS))
def rendered(name: str) -> tuple[Object, ...]:
    """Every object of a value set."""
    return tuple(objects(VALUE_SETS[name]))


def objects(values: Object) -> Iterator[Object]:
    for path, text in render(values).items():
        if path.endswith(".yaml"):
            yield from (found for found in yaml.safe_load_all(text) if found)


def of_kind(found: tuple[Object, ...], kind: str) -> dict[str, Object]:
    """Objects of a kind by the end of their names: "router" for demo-tandem-router."""
    return {one["metadata"]["name"].rpartition("-")[2]: one for one in found if one["kind"] == kind}


def workloads(found: tuple[Object, ...]) -> dict[str, Object]:
    """What keeps pods running, by role: Deployments and groups of pods."""
    return of_kind(found, "Deployment") | of_kind(found, "LeaderWorkerSet")


def pods(found: tuple[Object, ...]) -> dict[str, Object]:
    """Pod templates, the test's pod too: metadata and spec. Of a group the pod that speaks for it."""
    made = {name: one["spec"]["template"] for name, one in of_kind(found, "Deployment").items()}
    made |= {name: group_pod(one, 0) for name, one in of_kind(found, "LeaderWorkerSet").items()}
    return made | of_kind(found, "Pod")


def group_pod(group: Object, index: int) -> Object:
    """A pod of a LeaderWorkerSet with the label that its controller adds."""
    template = copy.deepcopy(group["spec"]["leaderWorkerTemplate"]["leaderTemplate" if index == 0 else "workerTemplate"])
    template["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
    made: Object = template
    return made


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector fits, of the two forms that the chart uses."""
    wanted = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    assert all(one["operator"] == "In" for one in selector.get("matchExpressions", []))
    return wanted and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def started(pod: Object, ip: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of the pod's only container, as the kubelet hands them over."""
    (container,) = pod["spec"]["containers"]
    env: dict[str, str] = {}
    for one in container["env"]:
        env[one["name"]] = _expanded(one["value"], env) if "value" in one else _value_from(one["valueFrom"], container, ip)
    return [_expanded(argument, env) for argument in container["args"]], env


def _expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: env[found.group(1)], text)


def _value_from(source: Object, container: Object, ip: str) -> str:
    (kind, reference), *more = source.items()
    assert not more
    if kind == "fieldRef":
        return {"metadata.name": f"{RELEASE}-tandem-0a1b2c3d4e-abcde", "status.podIP": ip}[reference["fieldPath"]]
    if kind == "secretKeyRef":
        return SECRET_URL if container["name"] == "router" else "secret"
    assert kind == "resourceFieldRef"
    assert (reference["containerName"], reference["divisor"]) == (container["name"], "1")
    kind, resource = reference["resource"].split(".")
    wanted = str(container["resources"].get(kind, {}).get(resource, "0"))
    return str(math.ceil(float(wanted[:-1]) / 1000 if wanted.endswith("m") else float(wanted)))


def settings_of(name: str, role: str) -> Any:
    """What the process of a role would make of its arguments and variables. Raises SettingsError."""
    ip = POD_IP[merged(VALUE_SETS[name])["ipFamily"]]
    arguments, env = started(pods(rendered(name))[role], ip)
    return load_settings(KINDS[role], arguments, env, prog=role)


def roles_in(name: str) -> list[str]:
    """The roles that a value set has pods of."""
    return [role for role in ROLES if role in pods(rendered(name))]

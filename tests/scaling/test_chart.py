"""What the chart makes of `scaling`: one autoscaler for a pool, the queries of the file, floors, and what it refuses."""

from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from bench.scaling.queries import Scope, read
from tests.unit.chart_render import CHART, NAMESPACE, ROLES, Object, merged, of_kind, render

SETS = ("hpa", "keda", "scale-to-zero")
WHOLE, NAME = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}


def closed(required: str = "", **properties: object) -> Object:
    """A schema of an object that has these and nothing else."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required.split()}


#: The parts of keda.sh/v1alpha1 that the chart uses, as KEDA documents them: another field would be dropped in silence.
SCALED_OBJECT = closed(
    "scaleTargetRef triggers",
    scaleTargetRef=closed("name", apiVersion=NAME, kind=NAME, name=NAME),
    pollingInterval=WHOLE,
    cooldownPeriod=WHOLE,
    minReplicaCount=WHOLE,
    maxReplicaCount=WHOLE,
    fallback=closed(
        "failureThreshold replicas", failureThreshold=WHOLE, replicas=WHOLE, behavior={"const": "currentReplicasIfHigher"}
    ),
    advanced=closed(horizontalPodAutoscalerConfig=closed("behavior", behavior={"type": "object"})),
    triggers={
        "type": "array",
        "items": closed(
            "type name metadata metricType",
            type={"const": "prometheus"},
            name=NAME,
            metricType={"const": "AverageValue"},
            authenticationRef=closed("name", name=NAME),
            metadata=closed(
                "serverAddress query threshold ignoreNullValues",
                serverAddress=NAME,
                query=NAME,
                threshold={"type": "string", "pattern": "^[0-9.]+$"},
                activationThreshold={"type": "string", "pattern": "^[0-9.]+$"},
                ignoreNullValues={"const": "false"},
            ),
        ),
    },
)


def values_of(name: str) -> Object:
    found: Object = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return found


def objects(values: Object) -> tuple[Object, ...]:
    pages = (text for path, text in render(values).items() if path.endswith(".yaml"))
    return tuple(one for text in pages for one in yaml.safe_load_all(text) if one)


def queries_of(values: Object) -> dict[str, dict[str, str]]:
    """What the templates must have made of the file."""
    scaling: Any = merged(values)["scaling"]
    prometheus, more = scaling["prometheus"], scaling["prometheus"]["matchers"]
    matchers = [
        f'{prometheus["namespaceLabel"]}="{NAMESPACE}",{prometheus["podLabel"]}=~"demo-tandem-{role}-[a-z0-9]+-[a-z0-9]+"'
        + (f",{more}" if more else "")
        for role in ("prefill", "decode", "router")
    ]
    quantile = scaling["objectives"]["interTokenQuantile"]
    return {
        pool: dict(found)
        for pool, found in read(Scope(*matchers, prometheus["window"], quantile, cost=prometheus["costWindow"])).items()
    }


def scaled_roles(values: Object) -> list[str]:
    return [role for role in ROLES if merged(values)["scaling"][role]["enabled"]]


@pytest.mark.parametrize("name", SETS)
def test_one_autoscaler_owns_the_number_of_pods(name: str) -> None:
    values = values_of(name)
    found, roles = objects(values), scaled_roles(values)
    kinds = {"HorizontalPodAutoscaler": [], "ScaledObject": []} | {
        kind: sorted(of_kind(found, kind)) for kind in ("HorizontalPodAutoscaler", "ScaledObject")
    }
    ours = "HorizontalPodAutoscaler" if values["scaling"]["by"] == "hpa" else "ScaledObject"
    assert kinds == {"HorizontalPodAutoscaler": [], "ScaledObject": [], ours: sorted(roles)}
    deployments = of_kind(found, "Deployment")
    for role in ROLES:
        assert ("replicas" in deployments[role]["spec"]) is (role not in roles)
    for role, one in of_kind(found, ours).items():
        target = one["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", deployments[role]["metadata"]["name"])


def test_without_scaling_nothing_is_made() -> None:
    kinds = {one["kind"] for one in objects({})}
    assert not kinds & {"HorizontalPodAutoscaler", "ScaledObject", "ConfigMap"}
    assert all("replicas" in one["spec"] for one in of_kind(objects({}), "Deployment").values())


@pytest.mark.parametrize("name", ["keda", "scale-to-zero"])
def test_scaled_objects_ask_the_queries_of_the_file_and_hold(name: str) -> None:
    values = values_of(name)
    expected, scaling = queries_of(values), merged(values)["scaling"]
    for role, one in of_kind(objects(values), "ScaledObject").items():
        spec, bounds = one["spec"], scaling[role]
        jsonschema.validate(spec, SCALED_OBJECT)
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (bounds["min"], bounds["max"])
        assert spec["fallback"]["replicas"] == max(1, bounds["min"])
        asked = {trigger["name"]: trigger["metadata"]["query"].strip() for trigger in spec["triggers"]}
        wanted = {name: query for name, query in expected[role].items() if name != "activation" or bounds["min"] == 0}
        assert asked == {name: query.strip() for name, query in wanted.items()}
        behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behaviour["scaleUp"]["stabilizationWindowSeconds"] < behaviour["scaleDown"]["stabilizationWindowSeconds"]


def test_an_empty_pool_is_started_by_what_waits_and_its_weight_is_nothing() -> None:
    triggers = of_kind(objects(values_of("scale-to-zero")), "ScaledObject")["prefill"]["spec"]["triggers"]
    (activation,) = [one["metadata"] for one in triggers if one["name"] == "activation"]
    assert (activation["activationThreshold"], activation["threshold"]) == ("1024", "1000000000")


def test_targets_follow_from_the_objectives() -> None:
    spec = of_kind(objects(values_of("keda")), "ScaledObject")["prefill"]["spec"]
    thresholds = {one["name"]: one["metadata"]["threshold"] for one in spec["triggers"]}
    assert thresholds == {"backlog": "250000", "busy": "0.7", "offered": "0.7"}  # 12,500 tokens a second for 4 times 5 s
    metrics = of_kind(objects(values_of("hpa")), "HorizontalPodAutoscaler")["decode"]["spec"]["metrics"]
    shown = {one["external"]["metric"]["name"].rpartition("decode_")[2]: one["external"]["target"] for one in metrics}
    assert {name: target["averageValue"] for name, target in shown.items()} == {
        **{"kv": "700m", "offered": "700m", "sequences": "96", "inter_token": "50m"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_horizontal_pod_autoscalers_are_valid(version: str) -> None:
    for one in of_kind(objects(values_of("hpa")), "HorizontalPodAutoscaler").values():
        kubernetes_validate.validate(one, version, strict=True)


def test_the_adapter_is_told_every_metric_that_is_asked_for() -> None:
    values = values_of("hpa")
    found = objects(values)
    rules = yaml.safe_load(of_kind(found, "ConfigMap")["adapter"]["data"]["values.yaml"])["rules"]["external"]
    told = {one["name"]["as"]: one["metricsQuery"].strip() for one in rules}
    asked = {
        metric["external"]["metric"]["name"]: role
        for role, one in of_kind(found, "HorizontalPodAutoscaler").items()
        for metric in one["spec"]["metrics"]
    }
    assert told.keys() == asked.keys()
    expected = queries_of(values)
    for name, role in asked.items():
        assert told[name] in [query.strip() for query in expected[role].values()]
    assert all('cluster="a"' in one["seriesQuery"] for one in rules)


REFUSED: list[tuple[Object, type[Exception], str]] = [
    ({"by": "both"}, helm_python.HelmValuesError, "/scaling/by"),
    ({"decode": {"min": 0}}, helm_python.HelmValuesError, "/scaling/decode/min"),
    ({"router": {"min": 0}}, helm_python.HelmValuesError, "/scaling/router/min"),
    ({"prefill": {"busy": 1.5}}, helm_python.HelmValuesError, "/scaling/prefill/busy"),
    ({"prometheus": {"matchers": "cluster"}}, helm_python.HelmValuesError, "/scaling/prometheus/matchers"),
    ({"prometheus": {"window": "1"}}, helm_python.HelmValuesError, "/scaling/prometheus/window"),
    ({"prefill": {"min": 9}}, helm_python.HelmRenderError, "scaling.prefill.min is 9: it must be at most scaling.prefill.max, 8"),
    ({"by": "hpa", "prefill": {"min": 0}}, helm_python.HelmRenderError, "only KEDA starts an empty pool"),
    ({"decode": {"sequences": 129}}, helm_python.HelmRenderError, "scaling.decode.sequences is 129"),
]


@pytest.mark.parametrize(("scaling", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_work_is_refused(scaling: Object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        render({"scaling": {"by": "keda", **scaling}})
    assert message in str(refused.value)


def test_other_values_are_looked_at_too() -> None:
    zero = {"by": "keda", "prefill": {"min": 0}}
    for values, message in (
        ({"metrics": {"enabled": False}, "scaling": zero}, "scaling.by is keda and metrics.enabled is false"),
        ({"decode": {"settings": {"computes_prompts": False}}, "scaling": zero}, "nobody would compute prompts"),
    ):
        with pytest.raises(helm_python.HelmRenderError) as refused:
            render(values)
        assert message in str(refused.value)
    without = {"prefill": {"enabled": False}, "scaling": {"by": "keda"}}
    assert sorted(of_kind(objects(without), "ScaledObject")) == ["decode", "router"]

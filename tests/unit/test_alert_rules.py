"""Rules, alerts, runbook and dashboards belong together: each alert is tested, explained, and points to where it is."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry import buckets
from tests.prometheus_server import RULES, program
from tools.dashboards import FOLDER, NAMES, read_dashboard

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SUITES = sorted((ROOT / "tests" / "promtool").glob("*.yaml"))
#: Patience for promtool on a busy machine, seconds.
PROMTOOL_S = 280.0


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((RULES / f"{name}.yaml").read_text())["groups"] for rule in group["rules"]]


ALERTS, RECORDS = rules("alerts"), rules("recording")
ALERT_NAMES = {alert["alert"] for alert in ALERTS}


def promtool(*words: str) -> None:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=PROMTOOL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_rules_are_well_formed() -> None:
    promtool("check", "rules", *(str(path) for path in sorted(RULES.glob("*.yaml"))))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_alerts_fire_and_do_not_fire(suite: Path) -> None:
    promtool("test", "rules", str(suite))


def test_every_alert_is_seen_firing_and_not_firing() -> None:
    asked: dict[str, set[bool]] = {name: set() for name in ALERT_NAMES}
    for path in SUITES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for one in test.get("promql_expr_test", ()):
                name = re.search(r'alertname="(\w+)"', one["expr"])
                assert name is not None and name[1] in ALERT_NAMES, one["expr"]
                asked[name[1]].add(bool(one["exp_samples"]))
    assert {name for name, seen in asked.items() if seen != {True, False}} == set()


def test_every_alert_has_its_paragraph_and_every_paragraph_its_alert() -> None:
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)) == ALERT_NAMES
    for paragraph in re.split(r"^### \w+$", RUNBOOK, flags=re.MULTILINE)[1:]:
        assert len(paragraph.split()) > 30, paragraph


def test_alerts_say_how_bad_they_are_and_where_to_read_on() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning"), alert["alert"]
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"


def test_what_the_runbook_points_to_is_there() -> None:
    anchors = set(re.findall(r"\]\(#(\w+)\)", RUNBOOK))
    assert anchors <= {name.lower() for name in ALERT_NAMES}
    flat = " ".join(RUNBOOK.split())
    named = re.findall(r'\*(service|prefill|decode)\*, ("[^"]+"(?:(?:,| and) "[^"]+")*)', flat)
    assert len(named) > 15
    for dashboard, quoted in named:
        titles = {panel.title for panel in read_dashboard(dashboard)[1]}
        assert set(re.findall(r'"([^"]+)"', quoted)) <= titles, (dashboard, quoted)
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert not [name for name in re.findall(r"\{(\w+)\}", RUNBOOK) if f"`{name}`" not in limits]


def test_the_windows_of_an_objective_ask_the_same() -> None:
    """The slow burns are tested on recorded values: here it shows that these are recorded as the fast ones are."""
    forms: dict[str, Counter[str]] = {}
    for record in RECORDS:
        name, _, window = record["record"].rpartition("ratio_rate")
        if name.endswith(("slow:", "errors:")):
            forms.setdefault(name, Counter())[record["expr"].replace(f"[{window}]", "[]")] += 1
    assert len(forms) == 3 and all(list(form.values()) == [7] for form in forms.values()), forms


def test_objectives_are_edges_of_their_histograms() -> None:
    text = (RULES / "recording.yaml").read_text()
    for metric, edges in (("first_token", buckets.FIRST_TOKEN_S), ("inter_token", buckets.INTER_TOKEN_S)):
        bounds = set(re.findall(rf'tandem_router_{metric}_seconds_bucket{{le="([\d.]+)"}}', text))
        assert len(bounds) == 1 and float(bounds.pop()) in edges


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_can_be_imported_and_say_what_they_show(name: str) -> None:
    found = json.loads((FOLDER / f"{name}.json").read_text())
    assert (found["id"], found["uid"], found["schemaVersion"]) == (None, f"tandem-{name}", 39)
    variables = [one["name"] for one in found["templating"]["list"]]
    assert variables == ["DS_PROMETHEUS", "namespace", "cell", *(["instance"] if name != "service" else [])]
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert max(Counter(panel["title"] for panel in panels if panel["type"] != "stat").values()) == 1
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 5 and panel["datasource"]["uid"] == "${DS_PROMETHEUS}", panel["title"]
        assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            assert 'cell=~"$cell"' in target["expr"] and 'namespace=~"$namespace"' in target["expr"], target["expr"]

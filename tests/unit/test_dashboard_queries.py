"""Queries of dashboards as Grafana would send them."""

import pytest

from tools.dashboards import NAMES, filled, legend, read_dashboard


def test_variables_stand_for_everything() -> None:
    asked = 'rate(x{namespace=~"$namespace", cell=~"$cell", instance=~"$instance"}[$__rate_interval])'
    assert filled(asked, "30s") == 'rate(x{namespace=~".*", cell=~".*", instance=~".*"}[30s])'


def test_a_variable_that_no_dashboard_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled('x{pod="$pod"}', "30s")


def test_legends_take_labels() -> None:
    assert legend("{{pool}} at {{ instance }}", {"pool": "decode", "instance": "d-0"}) == "decode at d-0"
    assert legend("p95 {{nobody}}", {}) == "p95 "
    assert legend("", {"b": "2", "a": "1", "__name__": "x"}) == "a=1, b=2"


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_is_read(name: str) -> None:
    title, panels = read_dashboard(name)
    assert title.startswith("Tandem / ") and len(panels) > 25
    assert all(panel.targets or panel.kind == "row" for panel in panels)
    assert not [target.expression for panel in panels for target in panel.targets if "$" in target.expression]

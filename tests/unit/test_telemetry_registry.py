import logging
import threading
import urllib.request

import numpy
import pytest

from telemetry.aliases import GatewayGauges, VllmAliases
from telemetry.decode_metrics import DecodeGauges, DecodeMetrics
from telemetry.prefill_metrics import PrefillGauges, PrefillMetrics
from telemetry.process_metrics import LoopLag, RpcMetrics
from telemetry.registry import MAX_CHILDREN, Computed, MetricsRegistry, MetricsServer
from telemetry.router_metrics import RouterGauges, RouterMetrics

TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def registry():
    return MetricsRegistry("test", "1.2", "abc")


def value(registry, name, **labels):
    return registry.registry.get_sample_value(name, labels)


def test_counts_and_closed_labels_start_at_zero(registry):
    ends = registry.counter("ends_total", "Ends.", {"reason": ("eos", "stop")})
    assert value(registry, "tandem_ends_total", reason="stop") == 0
    ends.inc(1, "eos")
    ends.inc(2, "eos")
    assert value(registry, "tandem_ends_total", reason="eos") == 3


WRONG = [
    (-1, "negative"),
    (float("nan"), "not_a_number"),
    (float("inf"), "not_a_number"),
    ("3", "not_a_number"),
    (None, "not_a_number"),
]


@pytest.mark.parametrize(("amount", "reason"), WRONG)
def test_b34_a_wrong_update_never_raises_and_is_counted_and_logged_once(registry, caplog, amount, reason):
    tokens = registry.counter("tokens_total", "Tokens.")
    step = registry.histogram("step_seconds", "Steps.", (0.1, 1))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            tokens.inc(amount)
            step.observe(amount)
    assert value(registry, "tandem_tokens_total") == 0
    assert value(registry, "tandem_step_seconds_count") == 0
    assert value(registry, "tandem_telemetry_errors_total", metric="tandem_tokens_total", reason=reason) == 3
    assert value(registry, "tandem_telemetry_errors_total", metric="tandem_step_seconds", reason=reason) == 3
    assert len(caplog.records) == 2


def test_numbers_of_numpy_are_numbers(registry):
    tokens = registry.counter("tokens_total", "Tokens.")
    tokens.inc(numpy.float32(2))
    tokens.inc(numpy.int64(3))
    assert value(registry, "tandem_tokens_total") == 5


def test_a_bad_label_is_counted_under_other(registry):
    ends = registry.counter("ends_total", "Ends.", {"reason": ("eos",)})
    ends.inc(1, "no such reason")
    ends.inc(1, 7)
    assert value(registry, "tandem_ends_total", reason="other") == 2
    assert value(registry, "tandem_telemetry_errors_total", metric="tandem_ends_total", reason="bad_label") == 2
    ends.inc(1)
    ends.inc(1, "eos", "more")
    assert value(registry, "tandem_telemetry_errors_total", metric="tandem_ends_total", reason="bad_label") == 4


def test_open_labels_are_bounded(registry):
    seen = registry.counter("seen_total", "Seen.", {"member": None})
    for number in range(MAX_CHILDREN + 50):
        seen.inc(1, f"member-{number}")
    assert value(registry, "tandem_seen_total", member="other") == 50
    assert value(registry, "tandem_seen_total", member="member-0") == 1


def test_computed_metrics_come_from_their_provider_at_each_scrape(registry):
    pages = {"free": 3.0, "owned": 1.0}
    made = registry.computed(
        [Computed("pages", "Pages.", "state"), Computed("seats", "Seats."), Computed("turns_total", "T.", counter=True)]
    )
    assert "tandem_seats 0" not in registry.text() and "tandem_pages{" not in registry.text()
    made.provide(lambda: {"pages": pages, "seats": sum(pages.values()), "turns_total": 9})
    assert value(registry, "tandem_pages", state="free") == 3
    pages["free"] = 8
    assert value(registry, "tandem_pages", state="free") == 8
    assert value(registry, "tandem_seats") == 9
    assert value(registry, "tandem_turns_total") == 9


@pytest.mark.parametrize("samples", [{"seats": -1}, {"seats": float("nan")}, {"seats": {"a": 1}}])
def test_a_wrong_sample_costs_itself_only(registry, samples):
    registry.counter("tokens_total", "Tokens.").inc(4)
    registry.computed([Computed("seats", "Seats.")]).provide(lambda: samples)
    assert "tandem_tokens_total 4.0" in registry.text()
    assert value(registry, "tandem_seats") is None
    assert 'tandem_telemetry_errors_total{metric="tandem_seats"' in registry.text()


def test_a_failing_provider_costs_its_own_samples_only(registry):
    registry.computed([Computed("seats", "Seats.")]).provide(lambda: {"seats": 1 / 0})
    registry.counter("tokens_total", "Tokens.").inc(4)
    assert "tandem_tokens_total 4.0" in registry.text()
    assert value(registry, "tandem_telemetry_errors_total", metric="computed", reason="provider") >= 1


def test_threads_lose_no_update(registry):
    tokens = registry.counter("tokens_total", "Tokens.", {"kind": None})
    threads = [threading.Thread(target=lambda: [tokens.inc(1, str(n % 7)) for n in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(value(registry, "tandem_tokens_total", kind=str(n)) for n in range(7)) == 4000


@pytest.mark.slow
def test_the_port_shows_metrics_and_exemplars(registry):
    registry.histogram("first_seconds", "First.", (0.1, 1)).observe(0.5, traceparent=TRACED)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        assert server.port > 0
        ask = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": "application/openmetrics-text"}
        )
        with urllib.request.urlopen(ask, timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert '# {trace_id="0af7651916cd43dd8448eb211c80319c"} 0.5' in text
    assert "tandem_build_info{" in text and 'kind="test"' in text and 'version="1.2"' in text
    assert "tandem_incarnation_start_timestamp_seconds" in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


def test_no_exemplar_for_a_trace_that_is_not_recorded(registry):
    step = registry.histogram("first_seconds", "First.", (0.1, 1))
    step.observe(0.5, traceparent=TRACED[:-1] + "0")
    step.observe(0.5, traceparent="garbage")
    assert value(registry, "tandem_first_seconds_count") == 2


@pytest.mark.parametrize(
    ("metrics", "gauges"), [(RouterMetrics, RouterGauges), (PrefillMetrics, PrefillGauges), (DecodeMetrics, DecodeGauges)]
)
def test_each_process_declares_its_metrics_once_and_well_named(registry, metrics, gauges):
    made = metrics(registry)
    made.gauges_from(gauges)
    families = {family.name: family for family in registry.registry.collect()}
    for name in families:
        assert name.startswith(("tandem_", "process_"))
        assert not name.endswith(("_ms", "_mb", "_count", "_sum", "_gauge"))
    assert value(registry, "tandem_telemetry_errors_total") is None
    with pytest.raises(ValueError, match="Duplicated"):
        metrics(registry)


def test_gauges_are_seen(registry):
    made = DecodeMetrics(registry)
    made.gauges_from(lambda: DecodeGauges(running_sequences=3, pages={"free": 5, "owned": 2}, kv_used_ratio=0.25))
    assert value(registry, "tandem_decode_running_sequences") == 3
    assert value(registry, "tandem_decode_pages", state="owned") == 2
    assert value(registry, "tandem_decode_kv_used_ratio") == 0.25
    made.step_part.observe(0.01, "model")
    assert value(registry, "tandem_decode_step_part_seconds_count", part="model") == 1


def test_calls_are_counted_by_method_and_status(registry):
    RpcMetrics(registry).ended("a.B/C", "OK", 0.1)
    assert value(registry, "tandem_rpc_server_calls_total", method="a.B/C", code="OK") == 1
    assert value(registry, "tandem_rpc_server_call_duration_seconds_count", method="a.B/C") == 1


async def test_lag_of_the_event_loop_is_measured(registry):
    await LoopLag(registry, period_s=0.001).run(range(3))
    assert value(registry, "tandem_event_loop_lag_seconds_count") == 3


def test_gateways_find_the_gauges_they_know(registry):
    VllmAliases(registry, lambda: GatewayGauges("m", 3, 2, 0.25, 16, 100))
    assert value(registry, "vllm:num_requests_running", model_name="m", engine="0") == 3
    assert value(registry, "vllm:num_requests_waiting", model_name="m", engine="0") == 2
    assert value(registry, "vllm:kv_cache_usage_perc", model_name="m", engine="0") == 0.25
    config = {"model_name": "m", "engine": "0", "block_size": "16", "num_gpu_blocks": "100"}
    assert value(registry, "vllm:cache_config_info", **config) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "accept",
    [
        "text/plain",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    ],
)
def test_names_of_aliases_are_whole_in_every_format(registry, accept):
    VllmAliases(registry, lambda: GatewayGauges("m", 3, 2, 0.25, 16, 100))
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        ask = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(ask, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        server.close()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in lines
    assert not [line for line in lines if line.startswith(("vllm_", "{"))]


def test_failing_aliases_cost_themselves_only(registry):
    VllmAliases(registry, lambda: 1 / 0)
    registry.counter("tokens_total", "Tokens.").inc(4)
    assert "tandem_tokens_total 4.0" in registry.text()
    assert value(registry, "tandem_telemetry_errors_total", metric="vllm_aliases", reason="provider") == 1

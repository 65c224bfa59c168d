"""Every query of dashboards and rules, asked of a real Prometheus that watched a real cell being used, and hurt."""

import asyncio
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
import yaml

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from telemetry import names
from tests.e2e.cells import ask, ask_all, fresh_id, greedy_request, read, stub_of
from tests.e2e.conftest import cell_of
from tests.otlp_collector import CollectedSpan, OtlpCollector, collecting
from tests.prometheus_server import RULES, program, scraping
from tests.waiting import until
from tools.dashboards import NAMES, Prometheus, read_dashboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LABELS = {"namespace": "tests", "cell": "one"}
#: What `$__rate_interval` is: longer than the run.
RATE = "2m"
WAIT_S = 60.0

#: Panels that show nothing while nothing of the kind happens: in this run nothing has, the rest of the tests makes it happen.
EMPTY = {
    ("service", "Requests without the store"): "the store never goes away",
    ("service", "Store errors"): "the store never goes away",
    ("decode", "Drains, p99"): "no grant is taken back while its writer lives",
    ("decode", "Pause of a moved sequence"): "nobody drains",
    ("decode", "Refused seats"): "there is room for every seat",
    ("decode", "Drafts"): "drafts are off unless they are asked for",
    ("prefill", "Failed writes"): "no write to a dead member is on its way",
}

#: Metrics that are not there before they count something; their alerts ask for the value, not for its growth.
FIRST_WHEN_IT_HAPPENS = {"tandem_telemetry_errors_total"}


def instances(cell: Cell) -> dict[str, str]:
    """host:port of the metrics of each process."""
    children = (*cell.routers, *cell.prefill, *cell.decode)
    return {child.name: f"127.0.0.1:{child.ready['metrics_port']}" for child in children}


@dataclass(frozen=True, slots=True)
class Watched:
    """A cell, and who watches it. `attached` and `lost` are ids of requests: of one that was taken up again, and of one whose
    decode member was killed, with the name of that."""

    cell: Cell
    prometheus: Prometheus
    collector: OtlpCollector
    attached: str
    lost: str
    killed: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A router, a prefill member and two decode members, with aliases for gateways, before, while and after they are used."""
    program("prometheus")
    extra = tuple((role, "--metrics-aliases=vllm") for role in ("prefill", "decode"))
    folder = tmp_path_factory.mktemp("prometheus")
    with pytest.MonkeyPatch.context() as environment, collecting() as collector:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        with (
            cell_of(decode_members=2, kv_tokens=4096, extra=extra, otlp_endpoint=collector.endpoint) as cell,
            scraping(instances(cell), LABELS, folder) as prometheus,
        ):
            attached, lost, killed = asyncio.run(_use(cell, prometheus))
            yield Watched(cell, prometheus, collector, attached, lost, killed)


@pytest.fixture
def watching(watched: Watched) -> Prometheus:
    """What was seen of it."""
    return watched.prometheus


async def _use(cell: Cell, prometheus: Prometheus) -> tuple[str, str, str]:
    """Requests of each kind of end, and a decode member that dies under one."""
    await _seen(prometheus, "tandem_router_queued_requests")
    async with stub_of(cell) as stub:
        text = [
            pb.GenerateRequest(request_id=fresh_id("dash"), text=f"Story {n} begins" * 8, max_output_tokens=24) for n in range(6)
        ]
        for request in text:
            request.stop.sequences.append("zyzzyva")
        yes = pb.GenerateRequest(request_id=fresh_id("dash"), text="Is the sky blue?", max_output_tokens=8)
        yes.grammar.regex = "(yes|no)"
        await ask_all(stub, [*text, yes, *(greedy_request(text_ids(n), 16) for n in range(4))], at_once=4)
        await ask(stub, greedy_request([5], 5, model="nobody"))
        await ask(stub, greedy_request([], 5))
        await _cancelled(stub)
        attached = await _attached(stub)
        await _seen(prometheus, "sum(tandem_router_cancels_total) > 0")
        lost, killed = await _killed(cell, stub)
    await _seen(prometheus, "sum(tandem_router_failovers_total) > 0")
    await _seen(prometheus, "cell:tandem_request_errors:ratio_rate1h")
    return attached, lost, killed


def text_ids(number: int) -> list[int]:
    """A prompt of some pages that begins like no other."""
    return [100 + number, *range(200, 260)]


async def _cancelled(stub: pb_grpc.InferenceServiceStub) -> None:
    request = greedy_request(text_ids(10), 600)
    call = stub.Generate(request, timeout=120)
    begun = await read(call, up_to="delta")
    await stub.Cancel(pb.CancelRequest(request_id=request.request_id, wait=True), timeout=30)
    assert (await read(call, begun)).status is grpc.StatusCode.CANCELLED


async def _attached(stub: pb_grpc.InferenceServiceStub) -> str:
    request = greedy_request(text_ids(11), 40, on_disconnect=pb.ON_DISCONNECT_DETACH)
    call = stub.Generate(request, timeout=120)
    begun = await read(call, up_to="delta")
    call.cancel()
    again = pb.AttachRequest(request_id=request.request_id, next_sequence_no=len(begun.sequence_nos))
    assert (await read(stub.Attach(again, timeout=120), begun)).reason == "max_output_tokens"
    return request.request_id


async def _killed(cell: Cell, stub: pb_grpc.InferenceServiceStub) -> tuple[str, str]:
    request = greedy_request(text_ids(12), 200)
    call = stub.Generate(request, timeout=120)
    begun = await read(call, up_to="delta")
    record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=30)).record
    next(child for child in cell.decode if child.name == record.decode_member).process.kill()
    assert (await read(call, begun)).reason == "max_output_tokens"
    return request.request_id, record.decode_member


async def _seen(prometheus: Prometheus, expression: str) -> None:
    """Waits until Prometheus has it."""

    async def there() -> object:
        return await asyncio.to_thread(prometheus.now, expression)

    await until(there, WAIT_S, f"Prometheus has {expression}")


def numbers(prometheus: Prometheus, expression: str) -> list[float]:
    """The values that can be drawn."""
    return [value for _, value in prometheus.now(expression) if math.isfinite(value)]


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_shows_something(watching: Prometheus, name: str) -> None:
    blank = set()
    for panel in read_dashboard(name, RATE)[1]:
        found = {target.legend: numbers(watching, target.expression) for target in panel.targets}
        if panel.kind != "row" and not any(found.values()):
            blank.add((name, panel.title))
    assert blank <= set(EMPTY), blank - set(EMPTY)
    titles = {panel.title for panel in read_dashboard(name)[1]}
    assert {title for dashboard, title in EMPTY if dashboard == name} <= titles


def test_every_rule_can_be_evaluated(watching: Prometheus) -> None:
    for group in watching.ask("rules")["groups"]:
        for rule in group["rules"]:
            assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                found = watching.now(rule["expr"])
                assert found or "alert" in rule, f"{rule['record']} has no value"


def test_every_metric_of_an_alert_is_told_by_somebody(watching: Prometheus) -> None:
    """An alert on a name that nothing tells would never fire, and look healthy."""
    told = set(watching.ask("label/__name__/values"))
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                asked = set(re.findall(r"\b(?:cell:)?tandem_[\w:]+", rule["expr"]))
                missing = asked - told - FIRST_WHEN_IT_HAPPENS
                assert not missing, (rule.get("alert") or rule["record"], missing)


def test_slow_points_lead_to_their_trace(watching: Prometheus) -> None:
    now = watching.now("time()")[0][1]
    words = {"query": "tandem_router_end_to_end_seconds_bucket", "start": str(now - 600), "end": str(now)}
    traces = {one["labels"]["trace_id"] for series in watching.ask("query_exemplars", words) for one in series["exemplars"]}
    assert traces and all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces)


def test_gateways_find_the_names_of_vllm_at_members(watching: Prometheus) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"):
        found = {labels["instance"] for labels, _ in watching.now(f"last_over_time({{__name__='{name}'}}[10m])")}
        assert found == {"prefill-0", "decode-0", "decode-1"}, name


def test_what_pools_scale_on_is_there(watching: Prometheus) -> None:
    ((labels, waiting),) = watching.now("cell:tandem_waiting_prompt_tokens:sum")
    assert labels == {**LABELS, "__name__": "cell:tandem_waiting_prompt_tokens:sum"} and waiting == 0
    assert 0 <= watching.now("cell:tandem_decode_kv_used:ratio")[0][1] <= 1
    assert watching.now("sum(tandem_prefill_waiting_sequences)")[0][1] == 0


async def trace_of(watched: Watched, request_id: str, *, attempts: int = 1) -> list[CollectedSpan]:
    """All spans of the trace of a request, when its root and the decode span of its last attempt are here."""

    async def whole() -> list[CollectedSpan]:
        spans = watched.collector.spans
        own = [span for span in spans if span.attributes.get(names.REQUEST_ID) == request_id]
        root = next((span for span in own if span.name == names.SPAN_GENERATE), None)
        last = [span for span in own if span.name == names.SPAN_DECODE and span.attributes[names.ATTEMPT] == attempts]
        return [span for span in spans if span.trace_id == root.trace_id] if root and last else []

    found = await until(whole, WAIT_S, f"the trace of {request_id} arrives")
    assert isinstance(found, list)
    return found


async def test_b52_a_request_that_lost_its_decode_member_is_one_trace(watched: Watched) -> None:
    """Both attempts under one Generate. What the killed member would have told went with it."""
    spans = await trace_of(watched, watched.lost, attempts=2)
    (root,) = (span for span in spans if span.name == names.SPAN_GENERATE)
    assert {span.parent_id for span in spans if span is not root} == {root.span_id}
    attempts = {(span.name, span.attributes[names.ATTEMPT]) for span in spans if span is not root}
    first = {(names.SPAN_QUEUE, 1), (names.SPAN_PREFILL, 1)}
    second = {(names.SPAN_DECODE, 2), (names.SPAN_SEND, 2)}
    assert first | second <= attempts and (names.SPAN_DECODE, 1) not in attempts
    (lost,) = (attributes for attributes in root.event_attributes if attributes.get(names.CAUSE) == "decode_lost")
    assert lost[names.ATTEMPT] in (1, 2) and root.attributes[names.ATTEMPT] == 2
    assert root.attributes[names.DECODE_MEMBER] != watched.killed
    assert root.ok and root.attributes[names.FINISH_REASONS] == ["max_output_tokens"]
    assert {span.service for span in spans} == {"tandem-router", "tandem-prefill", "tandem-decode"}


async def test_b52_a_stream_that_is_taken_up_again_links_to_its_request(watched: Watched) -> None:
    """A trace of its own, or its caller's: the request goes on whoever reads it."""
    root = next(span for span in await trace_of(watched, watched.attached) if span.name == names.SPAN_GENERATE)

    async def told() -> list[CollectedSpan]:
        found = watched.collector.named(names.SPAN_ATTACH)
        return [span for span in found if span.attributes[names.REQUEST_ID] == watched.attached]

    (attach,) = await until(told, WAIT_S, "the span of the attach arrives")
    assert attach.links == (root.trace_id,) and attach.trace_id != root.trace_id
    assert attach.ok and attach.attributes[names.SEQUENCE_NO] > 0

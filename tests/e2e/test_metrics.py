"""What the processes of a cell say about themselves: metrics that count right and logs that tell nothing private."""

import asyncio
import json
import re
from dataclasses import dataclass

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import PAGE_TOKENS, Cell
from tandem_cli.supervisor import Child
from tests.e2e.cells import STANDING, ask, ask_all, at_rest, fresh_id, greedy_request, read, stub_of
from tests.e2e.conftest import STEP_TOKENS, Observed
from tests.exact_dtype import EXACT_BYTES
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Of the default model: keys and values, layers, KV heads, head size, bytes; and the bytes of a row of logits.
PAGE_BYTES = PAGE_TOKENS * 2 * 30 * 3 * 64 * EXACT_BYTES
LOGITS_BYTES = 49_152 * 4
SCRAPE_S = 5.0

#: Every metric that a cell in use must show, without the prefix.
ROUTER = {
    *("router_requests_total", "router_failed_requests_total", "router_refusals_total", "router_tokens_total"),
    *("router_queued_requests", "router_oldest_queued_seconds", "router_queued_prompt_tokens", "router_running_requests"),
    *("router_first_token_seconds", "router_inter_token_seconds", "router_per_output_token_seconds"),
    *("router_end_to_end_seconds", "router_phase_seconds", "router_cancels_total", "router_cancel_effective_seconds"),
    *("router_attempts_total", "router_failovers_total", "router_store_seconds", "router_store_errors_total"),
    *("router_members", "router_stale_members", "router_leases", "router_open_tickets", "router_open_streams"),
    *("router_placements_total", "router_prefix_hints", "router_store_available", "router_unwritten_ends"),
    *("router_lease_lapses_total", "router_store_forgets_total", "router_moves_total", "router_adoptions_total"),
    *("router_goodput_requests_total",),
}
PREFILL = {
    *("prefill_requests_total", "prefill_step_seconds", "prefill_step_tokens", "prefill_step_sequences"),
    *("prefill_waiting_tokens", "prefill_running_sequences", "prefill_waiting_sequences", "prefill_pages"),
    *("prefill_computed_tokens_total", "prefill_pushed_bytes_total", "prefill_push_failures_total", "prefill_post_seconds"),
    *("prefill_handover_seconds", "prefill_handover_exposed_seconds", "prefill_handover_hidden_ratio", "prefill_handover_bytes"),
    *("prefill_kv_used_ratio", "prefill_open_grants", "prefill_pushes_in_flight", "prefill_drains_total"),
    *("prefill_cached_tokens_total", "prefill_prefix_indexed_pages", "prefill_prefix_pages_total"),
    *("prefill_prefix_stored_pages_total", "prefill_prefix_evicted_pages_total"),
}
DECODE = {
    *("decode_sequences_total", "decode_running_sequences", "decode_paused_sequences", "decode_waiting_sequences"),
    *("decode_step_seconds", "decode_step_part_seconds", "decode_step_tokens", "decode_step_sequences", "decode_tokens_total"),
    *("decode_kv_used_ratio", "decode_pages", "decode_grants_total", "decode_stream_buffer_bytes", "decode_slow_readers"),
    *("decode_handover_seconds", "decode_received_bytes_total", "decode_cancel_effective_seconds", "decode_refusals_total"),
    *("decode_open_grants", "decode_landing_rows", "decode_seats", "decode_stray_notices_total", "decode_preemptions_total"),
    *("decode_oldest_grant_seconds", "decode_grammars", "decode_draft_tokens_total"),
    *("decode_moves_total", "decode_moved_bytes_total", "decode_move_seconds", "decode_move_pause_seconds"),
    *("decode_cached_tokens_total", "decode_prefix_indexed_pages", "decode_prefix_pages_total"),
    *("decode_prefix_stored_pages_total", "decode_prefix_evicted_pages_total"),
}
EVERYONE = {
    *("build_info", "incarnation_start_timestamp_seconds", "event_loop_lag_seconds", "rpc_server_calls_total"),
    *("rpc_server_call_duration_seconds", "telemetry_errors_total"),
}


@dataclass(frozen=True)
class Scrape:
    """One reading of one process."""

    text: str
    values: dict[str, float]
    kinds: dict[str, str]

    def __getitem__(self, name: str) -> float:
        return self.values.get(f"tandem_{name}", 0.0)


async def scrape(child: Child) -> Scrape:
    """Read a process's /metrics as Prometheus does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(str(child.ready["metrics_port"])))
    try:
        async with asyncio.timeout(SCRAPE_S):
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()
    assert answer.split()[1] == "200"
    text = answer.partition("\r\n\r\n")[2]
    families = list(text_string_to_metric_families(text))
    values = {_series(sample.name, sample.labels): sample.value for family in families for sample in family.samples}
    return Scrape(text, values, {family.name: family.type for family in families})


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def processes(cell: Cell) -> tuple[Child, Child, Child]:
    """The first router, the prefill and the decode member."""
    return cell.routers[0], cell.prefill[0], cell.decode[0]


async def scrapes(cell: Cell) -> list[Scrape]:
    """All three, when the cell is at rest and its gauges show it."""
    await at_rest(cell)
    found: list[Scrape] = []

    async def resting() -> bool:
        found[:] = [await scrape(child) for child in processes(cell)]
        return found[0]["router_open_streams"] + found[1]["prefill_open_grants"] + found[2]["decode_seats"] == 0

    await until(resting, SCRAPE_S, "the gauges show that nothing runs")
    return found


async def test_every_metric_that_has_a_source_is_there(exact_cell: Cell) -> None:
    for child, own in zip(processes(exact_cell), (ROUTER, PREFILL, DECODE), strict=True):
        there = {name.removeprefix("tandem_") for name in (await scrape(child)).kinds}
        wanted = {name.removesuffix("_total") for name in own | EVERYONE}
        assert wanted <= there, wanted - there


async def test_requests_of_different_endings_are_counted_once_each(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    """Deltas between two scrapes: three served, one cancelled, two refused."""
    before = await scrapes(exact_cell)
    # No two begin alike, here or in another test: nothing is found in a cache.
    lengths = (PAGE_TOKENS, PAGE_TOKENS + 1, 2 * STEP_TOKENS + 5, PAGE_TOKENS)
    prompts = [tokenizer.encode(f"{length * 1001 + place} metrics " * 400)[:length] for place, length in enumerate(lengths)]
    requests = [greedy_request(prompt, 10) for prompt in prompts[:3]]
    cancelled = greedy_request(prompts[3], 600)
    async with stub_of(exact_cell) as stub:
        answers = await ask_all(stub, requests, at_once=3)
        call = stub.Generate(cancelled, timeout=60)
        last = await read(call, up_to="delta")
        await stub.Cancel(pb.CancelRequest(request_id=cancelled.request_id, wait=True), timeout=10)
        last = await read(call, last)
        assert last.status is grpc.StatusCode.CANCELLED
        assert (await ask(stub, greedy_request([], 5))).status is grpc.StatusCode.INVALID_ARGUMENT
        assert (await ask(stub, greedy_request([5], 5, model="nobody"))).status is grpc.StatusCode.NOT_FOUND
    router, prefill, decode = (
        {name: new.values[name] - old.values.get(name, 0.0) for name in new.values}
        for new, old in zip(await scrapes(exact_cell), before, strict=True)
    )

    usages = [answer.completed.usage for answer in (*answers, last)]
    prompt_tokens = sum(lengths)
    selected = sum(usage.selected_tokens for usage in usages)
    events = sum(len(answer.deltas) for answer in (*answers, last))
    expected = {
        "requests_total{outcome=max_output_tokens}": 3,
        "requests_total{outcome=cancelled}": 1,
        "refusals_total{cause=invalid}": 1,
        "refusals_total{cause=unknown_model}": 1,
        "goodput_requests_total": 3,
        "failed_requests_total": 0,
        "attempts_total": 4,
        "cancels_total{stage=decoding}": 1,
        "cancel_effective_seconds_count": 1,
        "tokens_total{kind=prompt}": prompt_tokens,
        "tokens_total{kind=selected}": selected,
        "tokens_total{kind=returned}": sum(usage.returned_tokens for usage in usages),
        "tokens_total{kind=cached}": 0,
        "first_token_seconds_count": 4,
        "inter_token_seconds_count": events - 4,
        "end_to_end_seconds_count": 4,
        "per_output_token_seconds_count": 3,
        "phase_seconds_count{phase=handover}": 4,
        "store_seconds_count{call=begin}": 4,
        "store_seconds_count{call=finish}": 4,
    }
    assert {name: router[f"tandem_router_{name}"] for name in expected} == expected
    handed_over = sum(-(-len(prompt) // PAGE_TOKENS) * PAGE_BYTES + LOGITS_BYTES for prompt in prompts)
    expected = {
        "requests_total{outcome=committed}": 4,
        "computed_tokens_total": prompt_tokens,
        "step_tokens_sum": prompt_tokens,
        "step_tokens_count": prefill["tandem_prefill_step_seconds_count"],
        "pushed_bytes_total": handed_over,
        "handover_bytes_sum": handed_over,
        "handover_seconds_count": 4,
        "push_failures_total{cause=transport_error}": 0,
    }
    assert {name: prefill[f"tandem_prefill_{name}"] for name in expected} == expected
    assert 3 <= prefill["tandem_prefill_step_seconds_count"] <= 6, "the longest prompt takes three steps"
    expected = {
        "sequences_total{finish_reason=max_output_tokens}": 3,
        "sequences_total{finish_reason=cancelled}": 1,
        "grants_total{outcome=offered}": 4,
        "grants_total{outcome=committed}": 4,
        "grants_total{outcome=reclaimed}": 0,
        "received_bytes_total": handed_over,
        "tokens_total{kind=selected}": selected,
        "cancel_effective_seconds_count": 1,
    }
    assert {name: decode[f"tandem_decode_{name}"] for name in expected} == expected


async def test_a_prompt_that_came_before_is_not_computed_and_sent_again(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    """B32: twice the same prompt of five pages and some tokens. Decode has the pages, lacks little, and computes that itself."""
    prompt = tokenizer.encode("cached prompts are cheap " * 40)[: 5 * PAGE_TOKENS + 3]
    async with stub_of(exact_cell) as stub:
        first = await ask(stub, greedy_request(prompt, 10))
        before = await scrapes(exact_cell)

        async def told() -> bool:
            return (await scrape(exact_cell.routers[0]))["router_prefix_hints{pool=decode}"] >= 6

        await until(told, SCRAPE_S, "the router knows what decode has")
        again = await ask(stub, greedy_request(prompt, 10))
    assert again.token_ids == first.token_ids
    assert [answer.completed.usage.cached_prompt_tokens for answer in (first, again)] == [0, 5 * PAGE_TOKENS]
    router, prefill, decode = (
        {name: new.values[name] - old.values.get(name, 0.0) for name in new.values}
        for new, old in zip(await scrapes(exact_cell), before, strict=True)
    )
    assert router["tandem_router_placements_total{way=decode_cached}"] == 1
    assert router["tandem_router_tokens_total{kind=cached}"] == 5 * PAGE_TOKENS == decode["tandem_decode_cached_tokens_total"]
    assert not prefill["tandem_prefill_computed_tokens_total"] and not prefill["tandem_prefill_pushed_bytes_total"]


async def test_at_rest_every_gauge_is_zero_and_nothing_was_updated_wrongly(exact_cell: Cell) -> None:
    """B34, B35."""
    for child, found in zip(processes(exact_cell), await scrapes(exact_cell), strict=True):
        gauges = [name for name, kind in found.kinds.items() if kind == "gauge" and name.startswith("tandem_")]
        held = {
            name: value
            for name, value in found.values.items()
            if name.partition("{")[0] in gauges and value and not STANDING.search(name.partition("{")[0])
        }
        pages = {name for name in held if "_pages{" in name}
        assert all("state=free" in name or "state=cached" in name for name in pages), held
        assert held.keys() == pages, (child.name, held)
        errors = {name: value for name, value in found.values.items() if name.startswith("tandem_telemetry_errors_total")}
        assert not any(errors.values()), (child.name, errors)
    router = (await scrapes(exact_cell))[0]
    assert router["router_members{pool=decode}"] == 1 == router["router_members{pool=prefill}"] == router["router_leases"]


async def test_no_label_holds_a_request_or_its_text(exact_cell: Cell) -> None:
    request = pb.GenerateRequest(request_id=fresh_id("label"), text="Quetzalcoatl", max_output_tokens=8)
    request.stop.sequences.append("zyzzyva")
    async with stub_of(exact_cell) as stub:
        await ask(stub, request)
        await stub.Cancel(pb.CancelRequest(request_id=request.request_id, reason="mnemonic"), timeout=10)
    for found in await scrapes(exact_cell):
        assert not re.search(r"request-|e2e-|label-|Quetzalcoatl|zyzzyva|mnemonic", found.text)
        assert max(len(labels) for labels in re.findall(r"\{(.*)\}", found.text)) < 250


async def test_logs_are_json_lines_that_name_requests_and_hold_no_text(observed: Observed) -> None:
    """With everything logged: a served, a cancelled, a refused request and one whose client leaves."""
    cell = observed.cell
    text = pb.GenerateRequest(request_id=fresh_id("log"), text="xylophones of Quetzalcoatl are", max_output_tokens=24)
    text.sampling.temperature = 0
    text.stop.sequences.append("zyzzyva")
    gone, stopped, refused = (greedy_request([7, 8, 9], 500) for _ in range(3))
    refused.sampling.temperature = -1
    async with stub_of(cell) as stub:
        answer = await ask(stub, text)
        for request in (gone, stopped):
            call = stub.Generate(request, timeout=60)
            begun = await read(call, up_to="delta")
            if request is gone:
                call.cancel()
            else:
                await stub.Cancel(pb.CancelRequest(request_id=request.request_id, reason="mnemonic", wait=True), timeout=10)
                await read(call, answer=begun)
        assert (await ask(stub, refused)).status is grpc.StatusCode.INVALID_ARGUMENT
    await at_rest(cell)
    ended = {"tandem-router": "request ended", "tandem-prefill": "prefill ended", "tandem-decode": "attempt ended"}
    ids = {text.request_id, gone.request_id, stopped.request_id}

    def lines(child: Child) -> list[dict[str, object]]:
        whole = child.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    for child in processes(cell):

        async def told(child: Child = child) -> bool:
            found = lines(child)
            return ids <= {line.get("request_id") for line in found if line["message"] == ended[str(line["service"])]}

        await until(told, 10.0, f"{child.name} logs the ends of requests")
        for line in lines(child):
            assert {"timestamp", "level", "logger", "service", "message"} <= line.keys()
            assert not (line["level"] in ("ERROR", "CRITICAL") or "exception" in line), line
            mentioned = re.findall(r"\b(?:log|e2e|text)-\d+\b", str(line["message"]))
            assert all(one == line.get("request_id") for one in mentioned), line
        whole = child.log.read_text()
        words = [word for word in answer.text.split() if len(word) > 6]
        for private in ("xylophones", "Quetzalcoatl", "zyzzyva", answer.text, *words):
            assert private not in whole, private

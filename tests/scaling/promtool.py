"""Asking the chart's queries of made-up scrapes, by the real PromQL engine in promtool."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from bench.scaling.queries import Scope, read
from bench.scaling.signals import Scrape
from telemetry.buckets import INTER_TOKEN_S

#: Of the made-up cell: as the chart writes matchers.
SCOPE = Scope(*(f'namespace="llm",pod=~"demo-{role}-.+"' for role in ("prefill", "decode", "router")), window="1m")
QUERIES = {f"{pool}.{name}": query for pool, queries in read(SCOPE).items() for name, query in queries.items()}
#: Between two scrapes; queries are asked a second after the last one.
EVERY_S = 15
TOLERANCE = 1e-6

Series = dict[str, list[float | None]]


def program(name: str) -> str:
    """Path of a program of Debian's package prometheus; skips without it, fails in CI."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} not here; on Debian: apt-get install prometheus")
    return found


def series_of(history: Sequence[Scrape]) -> Series:
    """The series that Prometheus would have of these scrapes."""
    found: Series = {}

    def put(place: int, metric: str, pod: str, value: float | None, **labels: str) -> None:
        more = "".join(f',{name}="{text}"' for name, text in labels.items())
        key = f'{metric}{{namespace="llm",pod="demo-{pod}"{more}}}'
        found.setdefault(key, [None] * len(history))[place] = value

    for place, scrape in enumerate(history):
        for name, prefill in scrape.prefill.items():
            put(place, "tandem_prefill_waiting_tokens", name, prefill.waiting_tokens)
            put(place, "tandem_prefill_step_seconds_sum", name, prefill.step_seconds)
        for name, decode in scrape.decode.items():
            put(place, "tandem_decode_kv_reserved_ratio", name, decode.kv_reserved)
            put(place, "tandem_decode_seats", name, decode.seats)
            put(place, "tandem_decode_running_sequences", name, decode.running)
        router = scrape.router
        if router is None:
            continue
        for pool, count in router.members.items():
            put(place, "tandem_router_members", "router-0", count, pool=pool)
        put(place, "tandem_router_queued_prompt_tokens", "router-0", router.queued_tokens)
        put(place, "tandem_router_queued_requests", "router-0", router.queued_requests or None, priority="0")
        put(place, "tandem_router_running_requests", "router-0", router.running_requests)
        put(place, "tandem_router_offered_prompt_tokens_total", "router-0", router.offered_tokens)
        put(place, "tandem_router_ready_prompt_tokens_total", "router-0", router.ready_tokens)
        for bound, number in zip((*map(str, INTER_TOKEN_S), "+Inf"), router.inter_token, strict=True):
            put(place, "tandem_router_inter_token_seconds_bucket", "router-0", number, le=bound)
    return found


def check(folder: Path, series: Series, expected: Mapping[str, float | None]) -> None:
    """Every named query answers what is expected after the last scrape; None: no answer at all."""
    last = max(len(values) for values in series.values())
    tests = []
    for name, value in expected.items():
        query = QUERIES[name]
        near = f"abs(({query}) - {value}) <= bool {TOLERANCE * max(1.0, abs(value))}" if value is not None else query
        samples = [{"labels": "{}", "value": 1}] if value is not None else []
        tests.append({"expr": near, "eval_time": f"{(last - 1) * EVERY_S + 1}s", "exp_samples": samples})
    written = [
        {"series": key, "values": " ".join("stale" if one is None else repr(float(one)) for one in values)}
        for key, values in series.items()
    ]
    # promtool knows the samples up to the last multiple of its evaluation interval.
    page = {
        "rule_files": [],
        "evaluation_interval": "1s",
        "tests": [{"interval": f"{EVERY_S}s", "input_series": written, "promql_expr_test": tests}],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(page))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(folder / "tests.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr

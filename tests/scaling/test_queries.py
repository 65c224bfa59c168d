"""The queries of the chart: they say what bench.scaling.signals says, hold when data are missing, and do not jump at restarts."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.scaling.signals import DecodeScrape, PrefillScrape, RouterScrape, Scrape, Window, signals
from telemetry.buckets import INTER_TOKEN_S
from tests.scaling.promtool import EVERY_S, check, series_of

pytestmark = pytest.mark.slow

ROUTER = RouterScrape({"prefill": 3, "decode": 2}, 9000.0, 3.0, 40.0)
PREFILL_NAMES, DECODE_NAMES = ("prefill-a", "prefill-b", "prefill-c"), ("decode-a", "decode-b")
LOADS = (
    *("prefill.backlog", "prefill.busy", "prefill.offered", "decode.kv", "decode.offered", "decode.sequences"),
    "decode.interToken",
)
#: Prompt tokens a second that come, and that get their KV, in `steady`.
OFFERED, READY = 9000.0, 6000.0


def steady(
    count: int = 8, busy: float = 0.8, kv: float = 0.6, router: RouterScrape = ROUTER, offered: float = OFFERED
) -> list[Scrape]:
    """Scrapes of three prefill and two decode members under an even load; half more comes than is served."""
    made = []
    for place in range(count):
        prefill = {name: PrefillScrape(2000.0, 1000.0 + busy * EVERY_S * place) for name in PREFILL_NAMES}
        decode = {name: DecodeScrape(kv, 20.0, 15.0) for name in DECODE_NAMES}
        counted = {"offered_tokens": 1e6 + offered * EVERY_S * place, "ready_tokens": 1e6 + READY * EVERY_S * place}
        sent = tuple(100_000 + place * 1000 * (bound >= 0.03) for bound in (*INTER_TOKEN_S, float("inf")))
        made.append(Scrape(float(place * EVERY_S), prefill, decode, replace(router, inter_token=sent, **counted)))
    return made


def test_prometheus_and_the_simulation_read_the_same(tmp_path: Path) -> None:
    dice = random.Random(5)
    history, sums, sent = [], dict.fromkeys(PREFILL_NAMES, 500.0), [50_000] * (len(INTER_TOKEN_S) + 1)
    offered = ready = 7e5
    for place in range(25):
        sums = {name: value + dice.uniform(0, EVERY_S) for name, value in sums.items()}
        rise = sorted(dice.randrange(2000) for _ in sent)
        sent = [count + more for count, more in zip(sent, rise, strict=True)]
        offered, ready = offered + dice.randrange(200_000), ready + dice.randrange(150_000)
        there = PREFILL_NAMES if place < 22 else PREFILL_NAMES[:2]  # one is not scraped any more
        if place > 20:
            there = (*there, "prefill-d")  # and one has just begun
            sums.setdefault("prefill-d", 0.5)
        prefill = {name: PrefillScrape(float(dice.randrange(9000)), sums[name]) for name in there}
        decode = {
            name: DecodeScrape(dice.random(), float(dice.randrange(20, 40)), float(dice.randrange(20))) for name in DECODE_NAMES
        }
        counted = {"offered_tokens": offered, "ready_tokens": ready}
        history.append(Scrape(float(place * EVERY_S), prefill, decode, replace(ROUTER, inter_token=tuple(sent), **counted)))
    check(tmp_path, series_of(history), signals(history, Window()))


def test_an_even_load_in_figures(tmp_path: Path) -> None:
    expected = {"prefill.backlog": 6000 + 9000, "prefill.busy": 2.4, "decode.kv": 1.2, "decode.sequences": 43}
    expected |= {"prefill.offered": 2.4 * 1.5, "decode.offered": 1.2 * 0.75 * 1.5}
    history = steady(25)
    assert {name: pytest.approx(value) for name, value in expected.items()} == {
        name: value for name, value in signals(history, Window()).items() if name in expected
    }
    check(tmp_path, series_of(history), {**expected, "router.requests": 43, "decode.interToken": 2 * (0.025 + 0.005 * 0.95)})


def test_a_member_that_is_not_scraped_counts_as_the_others(tmp_path: Path) -> None:
    history = steady()
    history[-1] = replace(
        history[-1], prefill={"prefill-a": PrefillScrape(2000.0, 1084.0)}, decode={"decode-b": DecodeScrape(0.6, 20, 15)}
    )
    expected = {"prefill.backlog": 15_000, "decode.kv": 1.2, "decode.sequences": 43}
    check(tmp_path, series_of(history), {**expected, "decode.offered": 1.2 * 0.75 * 1.5})


def test_a_member_that_starts_or_drains_changes_nothing_but_what_it_has(tmp_path: Path) -> None:
    history = steady()
    history[-1].prefill["prefill-d"] = PrefillScrape(0.0, 0.0)  # type: ignore[index]
    history[-1].decode["decode-c"] = DecodeScrape(0.5, 7.0)  # type: ignore[index]
    expected = {"prefill.backlog": 15_000, "prefill.busy": 2.4, "decode.kv": 1.7, "decode.sequences": 50}
    check(tmp_path, series_of(history), expected)


def test_what_is_offered_does_not_depend_on_how_many_serve_it(tmp_path: Path) -> None:
    """Half as many members that compute all the time, and twice as many that do half of it, are asked for the same."""
    for busy in (0.4, 0.8):
        history = steady(25, busy=busy)
        if busy == 0.4:
            doubled = [one.prefill | {f"{name}2": scraped for name, scraped in one.prefill.items()} for one in history]  # type: ignore[operator]
            history = [replace(one, prefill=members) for one, members in zip(history, doubled, strict=True)]
        check(tmp_path, series_of(history), {"prefill.offered": 2.4 * 1.5})


def test_four_times_the_load_is_seen_before_anything_has_piled_up(tmp_path: Path) -> None:
    history = steady(25, offered=READY, router=replace(ROUTER, queued_tokens=0.0))
    for place, one in enumerate(history[-5:]):  # a minute ago
        assert one.router is not None
        more = 3 * READY * EVERY_S * place
        history[place - 5] = replace(one, router=replace(one.router, offered_tokens=one.router.offered_tokens + more))
    check(tmp_path, series_of(history), {"prefill.offered": 4 * 2.4, "prefill.busy": 2.4, "prefill.backlog": 6000})


def test_nothing_is_asked_for_by_a_price_that_is_not_known(tmp_path: Path) -> None:
    """Requests come and nothing was ever computed; when nothing comes the answer is 0."""
    unknown = [replace(one, router=replace(one.router, ready_tokens=0.0)) for one in steady(25) if one.router is not None]
    check(tmp_path, series_of(unknown), {"prefill.offered": None, "decode.offered": None})
    idle = [replace(one, router=replace(one.router, offered_tokens=5e5)) for one in unknown if one.router is not None]
    check(tmp_path, series_of(idle), {"prefill.offered": 0, "decode.offered": 0})


@pytest.mark.parametrize("lost", ["members", "routers", "all"])
def test_lost_data_are_no_number_and_never_nought(tmp_path: Path, lost: str) -> None:
    history = steady()
    if lost in ("members", "all"):
        history += [replace(history[-1], at=history[-1].at + EVERY_S * more, prefill={}, decode={}) for more in range(1, 6)]
    if lost in ("routers", "all"):
        history = [*history[:-6], *(replace(one, router=None) for one in history[-6:])]
    nothing = dict.fromkeys(LOADS)
    if lost == "members":
        nothing.pop("decode.interToken")  # routers tell that
    series = series_of(history)
    for name in (*PREFILL_NAMES, *DECODE_NAMES):
        series[f'up{{namespace="llm",pod="demo-{name}"}}'] = [0.0 if lost != "routers" else 1.0] * len(history)
    check(tmp_path, series, nothing)


def test_a_restarted_member_does_not_jump(tmp_path: Path) -> None:
    history = steady()
    for place, one in enumerate(history[-2:]):
        one.prefill["prefill-a"] = PrefillScrape(0.0, 12.0 * place)  # type: ignore[index]
    check(tmp_path, series_of(history), {"prefill.backlog": 13_000})
    busy = signals(history, Window())["prefill.busy"]
    assert busy is not None and busy < 2.4


def test_a_queue_counts_only_for_the_pool_that_it_waits_for(tmp_path: Path) -> None:
    check(tmp_path, series_of(steady(busy=0.2, kv=0.9)), {"prefill.backlog": 6000, "decode.sequences": 43})
    check(tmp_path, series_of(steady(busy=0.9, kv=0.2)), {"prefill.backlog": 15_000, "decode.sequences": 40})


def test_no_traffic_is_nought_and_not_missing(tmp_path: Path) -> None:
    idle = [
        replace(one, router=replace(ROUTER, queued_tokens=0, queued_requests=0, running_requests=0))
        for one in steady(busy=0.0, kv=0.0)
    ]
    nothing = ("prefill.busy", "prefill.offered", "decode.kv", "decode.offered", "decode.interToken", "router.requests")
    check(tmp_path, series_of(idle), dict.fromkeys(nothing, 0.0))


def test_an_empty_pool_is_nought_only_when_nobody_is_there(tmp_path: Path) -> None:
    empty = [replace(one, prefill={}, router=replace(ROUTER, members={"prefill": 0, "decode": 2})) for one in steady()]
    series = series_of(empty)
    for name in DECODE_NAMES:
        series[f'tandem_decode_waiting_tokens{{namespace="llm",pod="demo-{name}"}}'] = [700.0] * len(empty)
    check(tmp_path, series, {"prefill.backlog": 0, "prefill.busy": 0, "prefill.offered": 0, "prefill.activation": 10_400})
    series['up{namespace="llm",pod="demo-prefill-a"}'] = [0.0] * len(empty)
    check(tmp_path, series, dict.fromkeys(("prefill.backlog", "prefill.busy", "prefill.offered")))


def test_routers_hold_while_one_of_them_is_not_scraped(tmp_path: Path) -> None:
    series = series_of(steady())
    series['up{namespace="llm",pod="demo-router-0"}'] = [1.0] * 8
    check(tmp_path, series, {"router.requests": 43})
    series['up{namespace="llm",pod="demo-router-1"}'] = [0.0] * 8
    check(tmp_path, series, {"router.requests": None})

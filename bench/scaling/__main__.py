"""`python -m bench.scaling TRACE`: autoscaled pools of a simulated cell under loads that change, and without measurements."""

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.cell_simulation.service_times import Accelerator, Model, ServiceTimes
from bench.cell_simulation.settings import CellSettings
from bench.cell_simulation.settings import Targets as Objectives
from bench.cell_simulation.trace import Arrival, read
from bench.report import table
from bench.scaling.hpa import Bounds
from bench.scaling.load import Stretch, Variant, along, varied
from bench.scaling.plan import Order, Plan, Targets, behaviour
from bench.scaling.run import Blackout, Load, Outcome, run
from bench.scaling.signals import Window

#: AMD Instinct MI325X, its data sheet: 1,307.4 TFLOP/s dense bf16, 6 TB/s, 256 GB; one 400 Gbit/s port for each device.
MI325X = Accelerator("MI325X 256 GB", 1307.4e12, 6e12, 256e9, 50e9)
#: Llama 3.1 70B, its published configuration: 70.6 G parameters, 80 layers, width 8192, 8 KV heads of 128.
LLAMA_70B = Model("Llama 3.1 70B", 70.6e9, 80, 8192, 8, 128, 131_072)
#: A large model: one member serves few requests a second, so hundreds of members can be played for minutes.
SERVICE = ServiceTimes(MI325X, LLAMA_70B)
INTER_TOKEN_S = 0.1
#: Large pages: there are fewer to count, and half of the last one of each sequence is nothing beside prompts of 12,000 tokens.
PAGE_TOKENS = 512
#: Where the pools begin, about what they are at the targets: prefill members for each second of computing that comes in a second,
#: decode members for each output token of which the KV would fill one.
PREFILL_PER_LOAD, DECODE_PER_LOAD = 1.62, 0.102
#: Seconds before the burst, of it, and after it.
BEFORE_S, BURST_S, AFTER_S = 240.0, 240.0, 480.0
#: A day in an hour: the rate swings by this share around its mean, lowest at the start. It is even for so many seconds.
DAY_S, SWING, DAY_STEP_S = 3600.0, 0.75, 60.0
#: Cases that are tried with pools of a fixed size, too.
FIXED_TOO = ("burst", "day")
COLUMNS = (
    *(
        "run",
        "requests",
        "served well",
        "came back",
        "later by p50 s",
        "p99 s",
        "not served",
        "TTFT p50 s",
        "TTFT p99 s",
        "prefill members",
        "decode members",
    ),
    *("changes", "well again after s", "member-hours"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: its load, from when on it is counted, when Prometheus is away, and from when a recovery is looked for."""

    name: str
    stretches: Sequence[Stretch]
    counted_from: float
    blackout: Blackout | None = None
    since: float | None = None


def cases(rate: float) -> list[Case]:
    """Even; four times as much for a while; a quarter as much, also while nothing is measured; a day in an hour."""
    even, more, less = Stretch(BEFORE_S, rate), Stretch(BURST_S, 4 * rate), Stretch(AFTER_S, rate)
    turns = (2 * math.pi * (at + 0.5) * DAY_STEP_S / DAY_S for at in range(round(DAY_S / DAY_STEP_S)))
    day = [Stretch(DAY_STEP_S, rate * (1 - SWING * math.cos(turn))) for turn in turns]
    dark = Blackout(BEFORE_S, BEFORE_S + 300.0)
    return [
        Case("even", [Stretch(2 * BEFORE_S, rate), Stretch(AFTER_S, rate)], 2 * BEFORE_S),
        Case("burst", [even, more, less], BEFORE_S, since=BEFORE_S),
        Case("scale-in", [even, Stretch(2 * AFTER_S, rate / 4)], BEFORE_S),
        Case("dark", [even, Stretch(300.0 + AFTER_S, rate / 4)], BEFORE_S, dark),
        Case("day", [Stretch(BEFORE_S, rate * (1 - SWING)), *day], BEFORE_S),
    ]


def begun(case: Case, trace: Sequence[Arrival], options: argparse.Namespace) -> CellSettings:
    """The cell as a run begins."""
    rate, promised = case.stretches[0].requests_per_s / len(trace), CellSettings().max_output_tokens
    prompts_s = rate * sum(SERVICE.prompt_s(one.prompt_tokens, CellSettings().prefill_step_tokens) for one in trace)
    held = rate * sum((one.prompt_tokens + promised) * one.output_tokens for one in trace) / SERVICE.kv_tokens
    return CellSettings(
        prefill_members=max(1, round(prompts_s * PREFILL_PER_LOAD)),
        decode_members=max(1, round(held * DECODE_PER_LOAD)),
        service=SERVICE,
        targets=Objectives(inter_token_s=INTER_TOKEN_S),
        page_tokens=PAGE_TOKENS,
        queue_share=options.share,
        refuses_waits=not options.blind,
        patience_s=options.patience,
        seed=options.seed,
    )


def fixed_like(case: Case, outcome: Outcome, first: CellSettings) -> CellSettings:
    """Pools that never change and cost as many member-hours."""
    hours = (sum(one.seconds for one in case.stretches) - case.counted_from) / 3600
    sizes = {pool: max(1, round(spent / hours)) for pool, spent in outcome.member_hours.items()}
    return replace(first, prefill_members=sizes["prefill"], decode_members=sizes["decode"])


def ideal(case: Case, first: CellSettings) -> Order:
    """What the load of a burst wants at the targets, by one who knows it as it begins."""
    most = max(one.requests_per_s for one in case.stretches) / case.stretches[0].requests_per_s
    return Order(case.counted_from, round(most * first.prefill_members), round(most * first.decode_members))


def row(name: str, outcome: Outcome, settings: CellSettings, case: Case) -> list[str]:
    """One line of the table."""
    again = outcome.good_again(case.since) if case.since is not None else None
    return [
        *(name, str(outcome.requests), f"{outcome.attainment:.1%}"),
        *(str(outcome.returned), f"{outcome.later_p50_s:.0f}", f"{outcome.later_p99_s:.0f}", str(outcome.not_served)),
        *(f"{outcome.ttft_p50_s:.2f}", f"{outcome.ttft_p99_s:.2f}"),
        sizes(outcome, "prefill", settings.prefill_members),
        sizes(outcome, "decode", settings.decode_members),
        str(outcome.changes_after(case.counted_from)),
        "-" if case.since is None else "not" if again is None else f"{again:.0f}",
        f"{sum(outcome.member_hours.values()):.1f}",
    ]


def sizes(outcome: Outcome, pool: str, first: int) -> str:
    """At the start, at most, at the end."""
    after = [first, *(size for _, name, _, size in outcome.changes if name == pool)]
    return f"{after[0]} → {max(after)} → {after[-1]}" if len(after) > 1 else str(first)


def main() -> None:
    """One line of JSON and one of the table for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="JSON lines with timestamp, input_length, output_length")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second without the burst (default: %(default)s)")
    parser.add_argument("--cases", default="even,burst,scale-in,dark,day", help="comma-separated (default: %(default)s)")
    parser.add_argument("--backlog", type=float, default=80_000.0, help="waiting tokens of a member (default: %(default)s)")
    parser.add_argument("--busy", type=float, default=0.7, help="share of time in which members compute (default: %(default)s)")
    parser.add_argument("--kv", type=float, default=0.7, help="share of KV used or promised (default: %(default)s)")
    parser.add_argument("--blind", action="store_true", help="do not ask what is offered, and refuse nobody for his wait")
    parser.add_argument("--scrape", type=float, default=10.0, help="between two scrapes, in seconds (default: %(default)s)")
    parser.add_argument("--rates", type=float, default=40.0, help="window of rates, in seconds (default: %(default)s)")
    parser.add_argument("--percent", type=int, default=300, help="by which a pool may grow in --up (default: %(default)s)")
    parser.add_argument("--window", type=float, default=300.0, help="of shrinking, in seconds (default: %(default)s)")
    parser.add_argument("--start", type=float, default=120.0, help="until a member works, in seconds (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=600.0, help="of a refused client, in seconds (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.33, help="of the queue clock, to be let in (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of placement and of --load (default: %(default)s)")
    parser.add_argument("--load", default="trace", choices=[one.value for one in Variant], help="what is made of the trace")
    parser.add_argument("--up", type=float, help="in which a pool may grow by --percent, in seconds (default: as --start)")
    parser.add_argument("--grouped", type=int, default=8, help="tokens in one event of the simulation (default: %(default)s)")
    parser.add_argument("--no-fixed", action="store_true", help="leave out the fixed pools of equal cost")
    options = parser.parse_args()
    trace = varied(read(options.trace), Variant(options.load), options.seed)
    gc.set_threshold(100_000, 50, 100)  # as bench.cell_simulation
    rows = []

    def ran(name: str, case: Case, settings: CellSettings, plan: Plan | None) -> Outcome:
        began = time.perf_counter()
        outcome = run(settings, loaded(case, trace, options.grouped), plan, case.blackout)
        rows.append(row(name, outcome, settings, case))
        print(json.dumps({"run": name, **asdict(outcome), "wall_s": round(time.perf_counter() - began, 1)}), flush=True)
        print(table(COLUMNS, rows[-1:]).splitlines()[-1], flush=True)
        return outcome

    known = {case.name: case for case in cases(options.rate)}
    for case in (known[name] for name in options.cases.split(",")):
        first = begun(case, trace, options)
        outcome = ran(case.name, case, first, planned(options))
        if case.since is not None and not options.no_fixed:
            ran(f"{case.name}, ordered as it begins", case, first, replace(planned(options), order=ideal(case, first)))
        if case.name in FIXED_TOO and not options.no_fixed:
            ran(f"{case.name}, fixed at equal cost", case, fixed_like(case, outcome, first), None)
    print(table(COLUMNS, rows))


def loaded(case: Case, trace: Sequence[Arrival], grouped: int) -> Load:
    """The requests of a case."""
    return Load(list(along(trace, case.stretches)), grouped, case.counted_from)


def planned(options: argparse.Namespace) -> Plan:
    """The autoscalers of a run."""
    busy, kv = options.busy, options.kv
    offered, offered_kv = (None, None) if options.blind else (busy, kv)
    targets = Targets(options.backlog, busy, offered, kv, offered_kv, inter_token=INTER_TOKEN_S)
    window = Window(options.rates)
    bounds = Bounds(1, 1000)
    up_s = options.start if options.up is None else options.up
    rules = behaviour(options.window, up_period_s=up_s, up_percent=options.percent)
    return Plan(targets, bounds, bounds, rules, window, options.scrape, start_s=options.start)


if __name__ == "__main__":
    main()

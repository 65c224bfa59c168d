"""The hand-over of one prompt beside a bare NIXL write of the same ranges, and its share of TTFT: `python -m bench.handover`."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import models
from bench.__main__ import MODES, WARM_UP_SEED, measured_on, start
from bench.disturbance import between, read_cpu_times
from bench.handover_ends import Setup, calls, two_ends
from bench.measured import Measured
from bench.report import machine, table, write_between
from bench.targets import Bound
from bench.turns import Bursts, doubts, ratio
from engine.layout import GroupKind, GroupLayout, Layout
from tandem_cli.load.drive import Run
from tandem_cli.load.workload import Lengths, Level, Loop, find_workload, load_workload

README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).parent / "results" / "README.md"
BANDWIDTH = Bound(0.7, 0.9)
SHARE = Bound(0.05, 0.03)
WORKLOAD = "fixed-512-128"
#: Of each request: what follows the first token is not looked at.
OUTPUT_TOKENS = 4
PAGE_TOKENS = 16
#: So many that one tick of /proc is no disturbance.
BURST_CALLS = 80
COLUMNS = ("what", "min ms", "median ms", "MB/s", "disturbed bursts")
TARGET_COLUMNS = ("figure", "ours", "against", "ratio", "must", "aim", "", "disturbed")


def setup_of(model: str, tokens: int, tls: str) -> Setup:
    """A prompt of so many tokens in the layout of a model in bfloat16."""
    ref = models.resolve(model)
    config = models.load_config(ref)
    group = GroupLayout(GroupKind.FULL, config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, "bfloat16")
    return Setup(Layout(ref.snapshot, (group,)), config.vocabulary_size, tokens, tls)


def in_turns(hand_over: Callable[[], float], bare: Callable[[], float], rounds: int) -> tuple[Bursts, Bursts]:
    """Bursts of both, round by round."""
    kept = (Bursts(), Bursts())
    for _ in range(rounds):
        for one, call in zip(kept, (hand_over, bare), strict=True):
            before = read_cpu_times()
            calls_s = [call() for _ in range(BURST_CALLS)]
            one.add(calls_s, between(before, read_cpu_times(), (os.getpid(),)).disturbed)
    return kept


def exposed_in_a_cell(model: str, tokens: int, requests: int) -> Measured:
    """Requests of so many tokens, one at a time, on a cell of one prefill and one decode member."""
    chosen = replace(load_workload(find_workload(WORKLOAD)), prompt=Lengths(tokens, tokens), beside=None)
    chosen = replace(chosen, output=Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS), requests_per_client=1)
    vocabulary_size, one = models.load_config(models.resolve(model)).vocabulary_size, Level(Loop.CLOSED, 1.0)
    with ExitStack() as stack:
        cell = start(stack, MODES[0], model, "bfloat16")
        measured_on(cell, Run(replace(chosen, requests_min=3), one, WARM_UP_SEED, vocabulary_size))
        return measured_on(cell, Run(replace(chosen, requests_min=requests), one, 0, vocabulary_size))


def bandwidth_row(hand_over: Bursts, bare: Bursts, size_bytes: int) -> list[str]:
    """A bare write's time over ours: ours over theirs in bytes a second."""
    found = ratio(bare, hand_over)
    rates = [f"{size_bytes / one.median / 1e6:.0f} MB/s" for one in (hand_over, bare)]
    bounds = [f"≥ {BANDWIDTH.must:g}", f"≥ {BANDWIDTH.aim:g}", BANDWIDTH.verdict(found, more_is_better=True)]
    return ["bandwidth against a bare NIXL write of the same ranges", *rates, f"{found:.2f}", *bounds, doubts(hand_over, bare)]


def share_row(measured: Measured, tokens: int) -> list[str]:
    """What of the hand-over comes after the last chunk, of TTFT."""
    exposed_s, first_s = measured.phase_s("handover_exposed_s", 0.5), measured.first_token_s(0.5)
    found = exposed_s / first_s
    figures = [f"{exposed_s * 1e3:.1f} ms not hidden", f"{first_s * 1e3:.0f} ms TTFT p50", f"{found:.1%}"]
    bounds = [f"≤ {SHARE.must:.0%}", f"≤ {SHARE.aim:.0%}", SHARE.verdict(found, more_is_better=False)]
    doubt = f"yes: {measured.disturbance}" if measured.disturbance.disturbed else "no"
    return [f"share of TTFT, {tokens} tokens in, 1P+1D, 1 at once", *figures, *bounds, doubt]


def bench_handover(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help=f"Bursts of {BURST_CALLS} of each; figures are medians over them.")] = 9,
    requests: Annotated[int, typer.Option(min=0, help="Requests to a cell, for the share of TTFT; 0: no cell.")] = 30,
    tls: Annotated[str, typer.Option(help="Transport: tcp, as members have it, or cma.")] = "tcp",
    model: Annotated[str, typer.Option(help="As for `tandem up`.")] = models.DEFAULT_MODEL,
    write: Annotated[
        bool, typer.Option("--write", help="Put the tables into bench/README.md and bench/results/README.md.")
    ] = False,
) -> None:
    """A prompt's KV from one process to another: by plan, books and pumps as members do it, and by one bare write."""
    tell = Console(stderr=True, highlight=False)
    with two_ends(setup_of(model, tokens, tls)) as (writer, reader):
        hand_over, bare = calls(writer, reader)
        parts, ranges, size_bytes = writer.do("parts", reader.do("offer", writer.do("name")))
        for warm_up in (hand_over, bare) * 3:
            warm_up()
        kept = in_turns(hand_over, bare, rounds)
    named = {f"hand-over, {parts} parts": kept[0], f"bare write, one transfer of {ranges} ranges": kept[1]}
    rows = [
        [what, f"{one.least * 1e3:.2f}", f"{one.median * 1e3:.2f}", f"{size_bytes / one.median / 1e6:.0f}", doubts(one)]
        for what, one in named.items()
    ]
    targets = [bandwidth_row(*kept, size_bytes)]
    if requests:
        tell.print("bandwidth is measured; starting a cell")
        targets.append(share_row(exposed_in_a_cell(model, tokens, requests), tokens))
    command = f"Command: `{' '.join(('python -m bench.handover', *sys.argv[1:]))}`"
    how = f"{tokens} tokens, {size_bytes / 1e6:.2f} MB with the row of logits, {tls}, {rounds} bursts of {BURST_CALLS} of each."
    text = "\n\n".join([how, f"Machine: {machine()}.", command, table(COLUMNS, rows)])
    print(f"{text}\n\n{table(TARGET_COLUMNS, targets)}")
    if write:
        write_between(README, "handover", text)
        write_between(RESULTS, "handover", f"{table(TARGET_COLUMNS, targets)}\n\n{how} {command}")


if __name__ == "__main__":
    typer.run(bench_handover)

"""`make bench-cell TRACE=…`: goodput of a cell by load, against round robin and against one pool of the same size."""

import argparse
import gc
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from bench.cell_simulation.cell import Cell
from bench.cell_simulation.figures import COLUMNS, row
from bench.cell_simulation.settings import CellSettings, Policy
from bench.cell_simulation.trace import at_rate, read
from bench.report import table
from decode_svc.preemption import Reservation


def changed(settings: CellSettings, name: str, value: str) -> CellSettings:
    """With another value: of a number of CellSettings, of its targets or its queue, or of the reservation."""
    if name == "reservation":
        return replace(settings, pressure=replace(settings.pressure, reservation=Reservation(value)))
    if hasattr(settings.targets, name):
        return replace(settings, targets=replace(settings.targets, **{name: float(value)}))
    if hasattr(settings.queue, name):
        return replace(settings, queue=replace(settings.queue, **{name: int(value)}))
    return replace(settings, **{name: type(getattr(settings, name))(float(value))})


def main() -> None:
    """One line of the table for each policy and rate, and one of JSON with all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="JSON lines with timestamp, input_length, output_length")
    parser.add_argument("--rates", default="120,160,200", help="requests a second, comma-separated")
    parser.add_argument("--policies", default="tandem,round robin,aggregated", help="comma-separated")
    parser.add_argument("--requests", type=int, default=None, help="only the first so many requests of the trace")
    parser.add_argument("--prefill", type=int, default=CellSettings().prefill_members, help="prefill members")
    parser.add_argument("--decode", type=int, default=CellSettings().decode_members, help="decode members")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another value, see `changed`")
    options = parser.parse_args()
    arrivals = read(options.trace, options.requests)
    base = replace(CellSettings(), prefill_members=options.prefill, decode_members=options.decode)
    for change in options.set:
        base = changed(base, *change.split("="))
    gc.set_threshold(100_000, 50, 100)  # millions of small values come and go, hardly any in cycles
    rows = []
    for rate in map(float, options.rates.split(",")):
        for policy in map(Policy, options.policies.split(",")):
            began = time.perf_counter()
            cell = Cell(replace(base, policy=policy), at_rate(arrivals, rate))
            outcome = cell.run()
            faults = cell.check()
            rows.append(row(policy.value, outcome))
            took = {"wall_s": round(time.perf_counter() - began, 1), "events": cell.events.done, "virtual_s": cell.events.now}
            said = {"policy": policy.value, "rate": rate, "changes": options.set, **asdict(outcome), **took}
            fences = sum(one.scheduler.handovers.counts.fences_asked for one in cell.decode)
            more = {"fences": fences, "short": cell.short, "refusals": cell.refusals, "faults": faults}
            print(json.dumps({**said, **more}), flush=True)
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()

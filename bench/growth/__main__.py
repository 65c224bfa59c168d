"""`python -m bench.growth`: what a token, a request and an idle request cost as work grows, and what a second router brings."""

import argparse
import sys
from pathlib import Path

from bench.growth import routers
from bench.growth.counting import Case, cost
from bench.growth.live_cases import LIVE_CASES, LIVE_SIZES
from bench.growth.member_cases import MEMBER_CASES
from bench.growth.output_cases import OUTPUT_CASES, OUTPUT_SIZES
from bench.growth.seat_memory import SEAT_KINDS, seat_bytes
from bench.report import machine, table, write_between

README = Path(__file__).resolve().parent.parent / "README.md"
#: Members of a pool; a router takes at most 1024.
MEMBER_SIZES = (10, 100, 1000)


def counts(cases: tuple[Case, ...], sizes: tuple[int, ...]) -> str:
    """A table of one row a case: lines of Python, and the time in microseconds."""
    rows = []
    for case in cases:
        cells = []
        for size in sizes if not case.size.startswith("members") else MEMBER_SIZES:
            found = cost(case, size)
            cells.append(f"{found.lines} ({found.seconds * 1e6:.0f})")
        rows.append([case.name, case.size, *cells, *[""] * (len(sizes) - len(cells)), case.linear and "grows: " + case.linear])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return table(("lines of Python (µs) for", "n counts", *(f"n = {size}" for size in sizes), ""), rows)


def held() -> str:
    """Bytes that one more request costs, by where it is."""
    note = "pages and the landing row are not counted"
    rows = [[f"decode: {kind}", f"{seat_bytes(tokens):,.0f}", note] for kind, tokens in SEAT_KINDS.items()]
    for hold, name in (("queued", "queued"), ("running", "with its seat, before the first token"), ("", "ended, stream kept")):
        rows.append(
            [f"router: {name}", f"{routers.memory(hold):,.0f}", "256 characters of prompt; Python's objects, not gRPC's buffers"]
        )
    return table(("one more request", "bytes", ""), rows)


def replicas(streams: int, tokens: int) -> str:
    """One and two routers over the same members and store."""
    rows = []
    for count in (1, 2):
        found = routers.relay(count, streams, tokens)
        rows.append(
            [
                str(count),
                f"{found['tokens_per_s']:,.0f}",
                f"{found['cpu_us_per_token']:.1f}",
                f"{found['tokens_per_cpu_s']:,.0f}",
                f"{found['tokens_per_cpu_s'] * count:,.0f}",
            ]
        )
    columns = ("routers", "tokens/s here", "CPU µs a token", "tokens/s and core", "tokens/s with a core for each")
    return table(columns, rows)


def main() -> None:
    """Measures and prints; `--write` puts it into bench/README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16, help="requests at once for the relayed tokens")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each of them")
    parser.add_argument("--samples", type=int, default=200, help="requests for the time to the first token")
    parser.add_argument("--write", action="store_true", help="put the tables into bench/README.md")
    options = parser.parse_args()
    parts = [f"Machine: {machine()}.", f"Command: `python -m bench.growth {' '.join(sys.argv[1:])}`"]
    parts += [counts(OUTPUT_CASES, OUTPUT_SIZES), counts((*LIVE_CASES, *MEMBER_CASES), LIVE_SIZES)]
    first = routers.first_tokens(options.samples)
    parts.append(
        table(
            ("first token, p50", "ms"),
            [
                ["through a router", f"{first['through_p50_ms']:.2f}"],
                ["the same members asked directly", f"{first['direct_p50_ms']:.2f}"],
                ["added by the router", f"{first['added_p50_ms']:.2f}"],
            ],
        )
    )
    parts += [replicas(options.streams, options.tokens), held()]
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        write_between(README, "growth", text)


if __name__ == "__main__":
    main()

"""python -m tests.simulation: worlds by seed, many or one."""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.world import run


def main() -> int:
    """Runs the worlds asked for; the exit status is 1 when something was wrong in one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="one world, with its history")
    parser.add_argument("--first", type=int, default=1, help="first of many seeds")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--most-failures", type=int, default=5, help="failed worlds after which no more are run")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        result = run(chosen.seed)
        print(result.report())
        print("\n".join(result.outcomes))
        return bool(result.faults)
    return _many(chosen)


def _many(chosen: argparse.Namespace) -> int:
    began, failed, outcomes, done = time.monotonic(), 0, Counter[str](), 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    with ProcessPoolExecutor(chosen.workers) as pool:
        for result in pool.map(run, seeds, chunksize=4):
            done += 1
            outcomes.update(result.outcomes)
            if result.faults:
                failed += 1
                print(result.report(), flush=True)
                if failed >= chosen.most_failures:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
            if done % 100 == 0:
                print(f"{done} worlds, {failed} failed, {done / (time.monotonic() - began):.1f} a second", flush=True)
    print(f"{done} worlds, {failed} failed, {time.monotonic() - began:.0f} s")
    for outcome, count in outcomes.most_common():
        print(f"  {count:6d}  {outcome}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.fuzz --minutes N`: every target in turn, with new seeds, until the time is over or something broke.

A line a round says what was tried. A failure prints its target and seed, with which `--target` and `--seed` find it again.
"""

import argparse
import logging
import sys
import time
import traceback

from tests.fuzz.target import Target, run
from tests.fuzz.targets import TARGETS

#: Cases of one round of a target.
EXAMPLES = 200


def main() -> int:
    """0: nothing broke; 1: something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each round adds one")
    parser.add_argument("--target", choices=[one.name for one in TARGETS], action="append", help="only these; may be repeated")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="cases of one round")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    targets = [one for one in TARGETS if not chosen.target or one.name in chosen.target]
    began_at, seed, cases, rounds = time.monotonic(), chosen.seed, 0, 0
    while True:
        for target in targets:
            if not _round(target, seed, chosen.examples, began_at):
                return 1
            rounds, cases = rounds + 1, cases + chosen.examples
            if time.monotonic() - began_at >= 60 * chosen.minutes:
                minutes = (time.monotonic() - began_at) / 60
                print(f"==> {minutes:.1f} minutes, {rounds} rounds, up to {cases} cases, {len(targets)} targets: nothing broke")
                return 0
        seed += 1


def _round(target: Target, seed: int, examples: int, began_at: float) -> bool:
    started = time.monotonic()
    try:
        run(target, seed, examples)
    except Exception:  # noqa: BLE001  (top of a process)
        traceback.print_exc()
        print(f"==> FAILED: python -m tests.fuzz --target {target.name!r} --seed {seed} --examples {examples}")
        return False
    now = time.monotonic()
    print(f"{now - began_at:8.1f} s  {target.name:14} seed {seed:6}  {now - started:6.1f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())

"""python -m tests.simulation.search: which seed first shows each planted mistake."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.mutations import MUTATIONS, shown

#: Worlds after which a mistake counts as not found.
MOST_SEEDS = int(os.environ.get("MOST_SEEDS", "500"))


def first_seed(name: str) -> tuple[int | None, str]:
    """The first seed whose world goes wrong with a mistake in it, and how."""
    for seed in range(1, MOST_SEEDS + 1):
        if fault := shown(MUTATIONS[name], seed):
            return seed, fault
    return None, ""


def main() -> int:
    """Prints them all, or those named; the exit status is 1 when one is not found."""
    names = [name for name in MUTATIONS if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    missing = 0
    with ProcessPoolExecutor(2) as pool:
        for name, (seed, fault) in zip(names, pool.map(first_seed, names), strict=True):
            missing += seed is None
            print(f'    "{name}": {seed},  # {fault[:120]}', flush=True)
    return missing > 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m engine.native`: compile the kernels for this CPU now, so that the first start need not.

`--bring-along` compiles them for every CPU into the installation itself, for an image that will hold no compiler.
"""

import argparse
import platform
import sys

from engine.native.build import BuildFailed, bring_along, library_for
from engine.native.instruction_sets import INSTRUCTION_SETS, PLAIN
from engine.native.library import chosen_set
from models.cache import cache_folder


def main() -> int:
    """Exit 0 when the libraries are there, 1 with a sentence when one cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m engine.native", description="Compile the native kernels.")
    parser.add_argument("--bring-along", action="store_true", help="for every CPU of this kind, into the installation")
    try:
        if parser.parse_args().bring_along:
            sets = INSTRUCTION_SETS if platform.machine() in ("x86_64", "AMD64") else (PLAIN,)
            paths = bring_along(sets)
        else:
            paths = [library_for(chosen_set(), cache_folder())]
    except BuildFailed as error:
        print(f"native kernels: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"native kernels: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m engine.native`: compile the kernels for this CPU now, so that the first start need not."""

import sys

from engine.native.build import BuildFailed, library_for
from engine.native.library import chosen_set
from models.cache import cache_folder


def main() -> int:
    """Exit 0 when the library is there, 1 with a sentence when it cannot be made."""
    try:
        path = library_for(chosen_set(), cache_folder())
    except BuildFailed as error:
        print(f"native kernels: {error}", file=sys.stderr)
        return 1
    print(f"native kernels: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

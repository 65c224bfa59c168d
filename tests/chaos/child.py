"""Runs a module as a child that is killed with the test: `python -m tests.chaos.child PARENT MODULE ARGUMENTS…`.

Not by SIGTERM, as `tandem_cli.child` does: a process that the test has stopped would not hear it. On SIGUSR2 it writes what
Python holds into the file that the variable OBJECTS_FILE names: "objects", "blocks" and "types", the most frequent.
"""

import collections
import ctypes
import gc
import json
import os
import runpy
import signal
import sys

#: The variable with the path of the file.
TOLD_OBJECTS = "OBJECTS_FILE"
#: Types that are told, those with the most objects.
TYPES = 200
_PR_SET_PDEATHSIG = 1


def tell_objects() -> None:
    """Count what the collector tracks and the blocks that are allocated, when all garbage is gone."""
    gc.collect()
    objects = gc.get_objects()
    types = collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
    told = {"objects": len(objects), "blocks": sys.getallocatedblocks(), "types": dict(types.most_common(TYPES))}
    path = os.environ[TOLD_OBJECTS]
    with open(f"{path}.new", "w") as file:
        json.dump(told, file)
    os.replace(f"{path}.new", path)


def main() -> None:
    """Asks the kernel (Linux) for SIGKILL when the parent is gone; then becomes the module."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)
    if TOLD_OBJECTS in os.environ:
        signal.signal(signal.SIGUSR2, lambda *_: tell_objects())
    del sys.argv[:2]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    main()

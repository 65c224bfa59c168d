"""Runs a module of the cell as a child that ends with its supervisor: `python -m tandem_cli.child PARENT MODULE ARGUMENTS…`.

PARENT is the supervisor's process id.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel (Linux) for SIGTERM when the parent is gone, however it went; then becomes the module.

    A module that ends has closed what it had open. The interpreter's own end is left out: taking down a loaded torch costs
    most of a second that nobody has a use for.
    """
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(128 + signal.SIGTERM)
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

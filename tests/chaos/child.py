"""Runs a module as a child that is killed with the test: `python -m tests.chaos.child PARENT MODULE ARGUMENTS…`.

Not by SIGTERM, as `tandem_cli.child` does: a process that the test has stopped would not hear it.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel (Linux) for SIGKILL when the parent is gone; then becomes the module."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)
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

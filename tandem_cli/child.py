"""Runs a module of the cell as a child that ends with its supervisor: `python -m tandem_cli.child MODULE ARGUMENTS…`."""

import ctypes
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel (Linux) for SIGTERM when the parent is gone, however it went; then becomes the module."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

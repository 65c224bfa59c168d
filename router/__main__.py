"""`python -m router`: one router of a cell."""

import sys

from router.config import RouterSettings
from router.service import Router
from rpc.serving import run
from rpc.settings import load_or_exit


def main() -> int:
    """Runs until a signal; returns the exit code of rpc.application.ExitCode."""
    settings = load_or_exit(RouterSettings, prog="python -m router", description="One router of a Tandem cell.")
    return run(lambda frame: Router(frame, settings), settings, "router")


if __name__ == "__main__":
    sys.exit(main())

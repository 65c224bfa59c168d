"""A process for the supervisor's tests: `python -m tests.unit.cli_child MODE [FILE NAME] --ready-fd N`."""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """MODE: `fails` before it is ready, `silent` is never ready, `stubborn` ignores SIGTERM, `writes FILE NAME` at its end."""
    mode, ready_fd = sys.argv[1], int(sys.argv[-1])
    if mode == "fails":
        print(json.dumps({"timestamp": "2026-01-02T03:04:05.678Z", "level": "ERROR", "message": "no such model"}), flush=True)
        return 3
    stop = signal.Signals.SIGUSR1 if mode == "stubborn" else signal.Signals.SIGTERM
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {stop})
    if mode == "silent":
        signal.sigwait({stop})
        return 0
    os.write(ready_fd, json.dumps({"address": f"{mode}:1"}).encode() + b"\n")
    os.close(ready_fd)
    signal.sigwait({stop})
    if mode == "writes":
        with Path(sys.argv[2]).open("a") as file:
            file.write(f"{sys.argv[3]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

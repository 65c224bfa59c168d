"""`python -m router.store_process`: the embedded store as a process of its own, for a cell with several routers."""

import json
import os
import signal
import sys
from typing import Annotated

import msgspec

from router.embedded import MEMORY_MIB, EmbeddedServer, EmbeddedServerError
from rpc.settings import load_or_exit, setting


class StoreSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The embedded store."""

    memory_mib: Annotated[int, setting("Memory that the records may take.", "MiB", ge=16, le=1_048_576)] = MEMORY_MIB
    ready_fd: Annotated[int, setting("File descriptor that gets one JSON line with the address when ready.", ge=3)] | None = None


def main() -> int:
    """Runs until SIGTERM or SIGINT; returns 0, or 1 when the server does not start."""
    settings = load_or_exit(StoreSettings, prog="python -m router.store_process", description="The embedded request store.")
    signals = {signal.SIGTERM, signal.SIGINT}
    try:
        with EmbeddedServer(memory_mib=settings.memory_mib) as server:
            # Not before: the server would inherit it, and SIGTERM could not end it. Until here its watcher ends it with us.
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            news = json.dumps({"kind": "store", "url": server.url, "address": server.url, "pid": os.getpid()})
            if settings.ready_fd is None:
                print(news, flush=True)
            else:
                with os.fdopen(settings.ready_fd, "w", encoding="utf-8") as pipe:
                    pipe.write(news + "\n")
            signal.sigwait(signals)
    except EmbeddedServerError as error:
        print(f"the store cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

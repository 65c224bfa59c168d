"""The peer's processes: servers in an environment of their own, set so that two cores serve it as well as they can.

What helps it, each found by trying: its engine and model in one process a core (`uni` executor: no second process that spins
while it waits), as many OpenMP threads as cores, tcmalloc, KV space and block size that fit its CPU kernels, a progress
thread of NIXL that sleeps (site/sitecustomize.py), and the affinity that its NIXL worker overrides set back after the start.
"""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import disturbance
from bench.sides import CONTEXT_TOKENS

#: Each start compiles the model.
READY_S = 900.0
END_S = 20.0
POLL_S = 0.5
MODEL_NAME = "peer"
KV_GIB = 1
BLOCK_TOKENS = 32
SEQUENCES_MAX = 64
TCMALLOC = (
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    Path("/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4"),
)
SITE = Path(__file__).with_name("site")
PROXY = Path(__file__).with_name("proxy.py")


class PeerFailed(Exception):
    """A process of the peer did not become ready. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the peer's Python is, what it serves, and where its logs and its compiled model go."""

    python: Path
    model: Path
    logs: Path
    cache: Path


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """One server. cores: ids that its model runs on. side_port: of its NIXL worker, 0 without one."""

    name: str
    cores: tuple[int, ...]
    side_port: int = 0
    prefix_caching: bool = False
    extra: tuple[str, ...] = ()


@dataclass(slots=True)
class Process:
    """One running process of the peer."""

    name: str
    address: str
    log: Path
    popen: subprocess.Popen[bytes]


def settings_of(options: ServerOptions) -> dict[str, str]:
    """What is set in a server's environment, for the record too."""
    cores = ",".join(str(core) for core in options.cores)
    made = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(len(options.cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "UCX_USE_MT_MUTEX": "y",
    }
    if options.side_port:
        made["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.side_port)
    if tcmalloc := next((path for path in TCMALLOC if path.exists()), None):
        made["LD_PRELOAD"] = str(tcmalloc)
    return made


def arguments_of(options: ServerOptions) -> list[str]:
    """A server's flags, without model and address."""
    flags = {
        "dtype": "bfloat16",
        "max-model-len": CONTEXT_TOKENS,
        "block-size": BLOCK_TOKENS,
        "max-num-seqs": SEQUENCES_MAX,
        "distributed-executor-backend": "uni",
    }
    if options.side_port:
        flags["kv-transfer-config"] = json.dumps(
            {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        )
    caching = "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    made = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [*made, caching, "--enable-chunked-prefill", *options.extra]


class Peer:
    """Owns the peer's processes: when its `with` block ends they are gone."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._processes: list[Process] = []

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._processes)

    def start(self, options: ServerOptions) -> Process:
        """Start a server; it is ready after `wait_ready`."""
        here, port = self._environment, free_port()
        command = [str(here.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(here.model)]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--disable-uvicorn-access-log", *arguments_of(options)]
        extra = {
            **settings_of(options),
            "VLLM_CACHE_ROOT": str(here.cache),
            "TORCHINDUCTOR_CACHE_DIR": str(here.cache / "inductor"),
            "PYTHONPATH": str(SITE),
        }
        return self._spawn(options.name, command, port, extra)

    def start_proxy(self, prefill: Process, decode: Process) -> Process:
        """Start the door of a P/D pair."""
        port = free_port()
        command = [str(self._environment.python), str(PROXY), str(port), prefill.address, decode.address]
        return self._spawn("proxy", command, port, {})

    def wait_ready(self, processes: Sequence[Process], path: str = "/health") -> None:
        """Until all answer. Raises PeerFailed."""
        deadline = time.monotonic() + READY_S
        for process in processes:
            while not _answers(f"http://{process.address}{path}"):
                if process.popen.poll() is not None or time.monotonic() > deadline:
                    lines = process.log.read_text(errors="replace").splitlines()[-40:]
                    raise PeerFailed(f"{process.name} did not become ready; the end of its log:\n" + "\n".join(lines))
                time.sleep(POLL_S)

    def stop(self, processes: Sequence[Process]) -> None:
        """SIGTERM, then SIGKILL to what is left of each one's family."""
        families = [family(process.popen.pid) for process in processes]
        for process in processes:
            process.popen.terminate()
        for process, members in zip(processes, families, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(END_S)
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, 9)
            process.popen.wait()
        self._processes = [one for one in self._processes if one not in processes]

    def _spawn(self, name: str, command: Sequence[str], port: int, extra: Mapping[str, str]) -> Process:
        log = self._environment.logs / f"{name}.log"
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")}
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**kept, **extra}, cwd=log.parent
            )
        process = Process(name, f"127.0.0.1:{port}", log, popen)
        self._processes.append(process)
        return process


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    times = disturbance.read_cpu_times()
    return [key[0] for key in disturbance.family(times, (pid,))]


def pin(pid: int, cores: Sequence[int]) -> None:
    """Every thread of a process and of its descendants runs on these cores from now on."""
    for member in family(pid):
        for thread in Path(f"/proc/{member}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True  # it serves; the path is not its own
    except OSError:
        return False

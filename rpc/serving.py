"""A process that serves gRPC: start, ready, watched, drained, stopped. Routers and members are built into it."""

import asyncio
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc
import uvloop

from rpc import admin
from rpc.admin import AdminServicer
from rpc.application import Application, Build, ExitCode, Frame
from rpc.cell_identity import CellIdentity
from rpc.channels import Limits, server_options
from rpc.dialling import dialler
from rpc.gate import Gate
from rpc.health import Health
from rpc.incarnation import new_incarnation
from rpc.interceptors import CallGuard
from rpc.reflection import add_reflection
from rpc.server_settings import ServerSettings
from rpc.status import loading
from rpc.tls import server_tls
from tandem.pools.v1 import member_pb2_grpc
from telemetry import names
from telemetry.logs import setup_logging
from telemetry.process_metrics import LoopLag, RpcMetrics
from telemetry.registry import MetricsRegistry, MetricsServer
from telemetry.tracing import setup_tracing

#: Seconds between two looks at the heartbeat.
HEARTBEAT_PERIOD_S = 1.0
#: Most seconds, and the share of the drain budget, kept back for stopping what did not end by itself.
STOP_RESERVE_S = 2.0
STOP_RESERVE_SHARE = 0.2
#: Seconds that an application has to stop, however short its drain was to be: what it can not close stays open.
STOP_LEAST_S = 0.5
#: Seconds that calls of no application, such as health watches, get at the end.
SERVER_GRACE_S = 0.25
#: Seconds from a crash until the process ends, whatever its event loop does.
CRASH_EXIT_S = 10.0
#: Seconds for telling streams about a crash.
CRASH_STOP_S = 3.0
#: Seconds for the last spans, and for closing any one thing.
FLUSH_S = 2.0
CLOSE_S = 3.0

#: host:port, [v6]:port
_HAS_PORT = re.compile(r"^([^:]+|\[.+\]):\d{1,5}$")
#: An IPv6 address without brackets; a port cannot follow it.
_IS_V6 = re.compile(r"^[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*$")

_LOG = logging.getLogger("serving")


class Process:
    """One run of an application, from the bound port to the last flushed span."""

    def __init__(self, build: Build, settings: ServerSettings, kind: str, owns_process: bool = False) -> None:
        """`owns_process`: signals, a crash's last resort and a second signal may end the interpreter."""
        self._build = build
        self._settings = settings
        self._kind = kind
        self._owns_process = owns_process
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._crashed = asyncio.Event()
        self._crash: BaseException | None = None
        self._ready = False
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        #: What is open, each with the way to close it; closed from the last to the first.
        self._closers: list[Callable[[], Awaitable[object]]] = []
        self._application: Application | None = None
        self._gated: frozenset[str] = frozenset()
        self.health = Health(())
        self.frame: Frame | None = None
        self.metrics_port: int | None = None
        #: host:port of the server for health alone, where there is one.
        self.health_address: str | None = None
        #: Something could not be stopped: only the end of the interpreter ends it.
        self.stuck = False
        #: Why it could not start; "" otherwise.
        self.failure = ""

    async def open(self) -> Frame:
        """Bind, build, start, become ready. Whatever it raises, `close` is still to be called."""
        settings, incarnation = self._settings, new_incarnation()
        metrics = MetricsRegistry(self._kind, _version(), incarnation)
        identity = CellIdentity(settings)
        self._gate, dial = Gate(identity), dialler(settings, identity)
        guard = CallGuard(RpcMetrics(metrics).ended, self._admit)
        server = grpc.aio.server(interceptors=[guard], options=server_options(_limits(settings)))
        address = _bind(server, settings)
        self._closers.append(lambda: server.stop(SERVER_GRACE_S))
        name = settings.name or f"{self._kind}-{address}"
        resource = {"service.version": _version(), "service.instance.id": incarnation, names.MEMBER: name}
        tracing = setup_tracing(f"tandem-{self._kind}", settings.otlp_endpoint or None, resource=resource)
        self._closers.insert(0, lambda: asyncio.to_thread(tracing.shutdown, FLUSH_S))
        if settings.metrics_port is not None:
            shown = MetricsServer(metrics, settings.listen.rpartition(":")[0].strip("[]"), settings.metrics_port)
            self._closers.insert(1, lambda: asyncio.to_thread(shown.close))
            self.metrics_port = shown.port
        told = (self._kind, name, address, incarnation, settings, tracing, metrics, self.crashed, self.draining)
        frame = Frame(*told, dial=dial, gate=self._gate)
        self.frame = frame
        self._application = application = self._build(frame)
        await self._add_services(server, application)
        await server.start()
        if settings.health_listen:
            await self._open_health(settings.health_listen)
        self._tasks.append(asyncio.create_task(LoopLag(metrics).run(), name="loop-lag"))
        await application.start()
        self._ready = True
        await self.health.set_ready(True)
        self._tasks.append(asyncio.create_task(self._watch_heartbeat(frame.name, application), name="heartbeat"))
        return frame

    async def run(self) -> int:
        """Open, tell the supervisor, serve until a signal or a crash, close. Returns the exit code."""
        opening = asyncio.create_task(self.open(), name="open")
        ended = asyncio.create_task(self._ending.wait(), name="ending")
        await asyncio.wait({opening, ended}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not opening.done():
                # A model being loaded in another thread cannot be interrupted: nobody waits for it.
                self.stuck = True
                opening.cancel()
                return ExitCode.CRASHED if self._crash else ExitCode.OK
            if (failure := opening.exception()) is not None:
                _LOG.error("%s cannot start: %s", self._kind, failure, exc_info=failure)
                self.failure = str(failure)
                return ExitCode.START_FAILED
            self._tell_ready(opening.result())
            await ended
            return await self.drain()
        finally:
            ended.cancel()
            await self.close()

    def request_stop(self) -> None:
        """Begin the end, as the first signal does."""
        self._ending.set()

    def draining(self) -> bool:
        """Whether the end has begun."""
        return self._draining

    def crashed(self, crash: BaseException) -> None:
        """The application broke: end the process. May be called in any thread."""
        _LOG.critical("%s crashed: %s", self._kind, type(crash).__name__, exc_info=crash)
        if self._owns_process:
            last_resort = threading.Timer(CRASH_EXIT_S, os._exit, (ExitCode.CRASHED,))
            last_resort.daemon = True
            last_resort.start()
        self._loop.call_soon_threadsafe(self._note_crash, crash)

    async def drain(self) -> int:
        """Stop in the order of a shutdown that loses nothing, within drain_timeout_s as a whole; returns the exit code.

        Not ready; settle, still taking work; refuse new work; wait for what runs; then end the rest with a typed error.
        """
        application, frame = self._application, self.frame
        assert application is not None and frame is not None  # only an opened process drains
        ends_at = self._loop.time() + self._settings.drain_timeout_s
        reserve_s = min(STOP_RESERVE_S, STOP_RESERVE_SHARE * self._settings.drain_timeout_s)
        self._draining = True
        await self.health.drain()
        _LOG.info("%s drains, within %s s", frame.name, self._settings.drain_timeout_s)
        await _until(self._crashed.wait(), self._settings.drain_settle_s)
        application.begin_drain()
        clean = await self._drained(application, max(0.0, ends_at - reserve_s - self._loop.time()))
        stop_s = CRASH_STOP_S if self._crash is not None else max(STOP_LEAST_S, ends_at - self._loop.time() - SERVER_GRACE_S)
        if not await _until(application.stop(), stop_s):
            self.stuck = True
            _LOG.error("%s did not stop within %.2f s", frame.name, stop_s)
        self._application = None
        if self._crash is not None:
            return ExitCode.CRASHED
        if not clean:
            _LOG.error("drain_timeout_s was over before everything had ended; the rest was cut")
        return ExitCode.OK if clean and not self.stuck else ExitCode.DRAIN_CUT

    async def close(self) -> None:
        """Stop servers and tasks and flush the last spans. Safe after an `open` that failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._application is not None:
            application, self._application = self._application, None
            self.stuck |= not await _until(application.stop(), CRASH_STOP_S)
        while self._closers:
            await _until(self._closers.pop()(), CLOSE_S)

    async def _drained(self, application: Application, budget_s: float) -> bool:
        """Wait until nothing runs; False when the budget was over or a crash came first."""
        waiting = asyncio.create_task(application.drained(), name="drained")
        crash = asyncio.create_task(self._crashed.wait(), name="crashed")
        await asyncio.wait({waiting, crash}, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        clean = waiting.done()
        for task in (waiting, crash):
            task.cancel()
        await asyncio.gather(waiting, crash, return_exceptions=True)
        if clean and (failure := waiting.exception()) is not None:
            _LOG.error("waiting for the end of what runs failed", exc_info=failure)
            return False
        return clean

    async def _add_services(self, server: grpc.aio.Server, application: Application) -> None:
        application.add_to(server)
        member_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(application.check), server)
        served = [*application.service_names, admin.SERVICE_NAME]
        self._gated = frozenset(served)
        self.health = Health(application.service_names)
        await self.health.open(server)
        if self._settings.reflection:
            add_reflection(server, [*served, self.health.service_name])

    async def _open_health(self, listen: str) -> None:
        """A server of its own for health alone: a kubelet's probes speak neither TLS nor tokens."""
        server = grpc.aio.server(options=server_options())
        self.health_address = _taken_port(listen, server.add_insecure_port)
        self._closers.append(lambda: server.stop(SERVER_GRACE_S))
        await self.health.open(server)
        await server.start()

    async def _admit(self, method: str, context: Any) -> None:
        await self._gate.admit(method, context)
        if not self._ready and method.partition("/")[0] in self._gated:
            raise loading(self.frame.name if self.frame is not None else self._kind)

    async def _watch_heartbeat(self, name: str, application: Application) -> None:
        alive = True
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            now_alive = not application.stalled(time.monotonic())
            if now_alive != alive:
                alive = now_alive
                _LOG.log(logging.INFO if alive else logging.ERROR, "%s is %s", name, "alive" if alive else "stalled")
                await self.health.set_alive(alive)

    def _note_crash(self, crash: BaseException) -> None:
        self._crash = crash
        self._crashed.set()
        self._ending.set()

    def _tell_ready(self, frame: Frame) -> None:
        news = {
            "kind": frame.kind,
            "name": frame.name,
            "address": frame.address,
            "metrics_port": self.metrics_port,
            "health_address": self.health_address,
            "incarnation": frame.incarnation,
            "pid": os.getpid(),
            **frame.addresses,
        }
        _LOG.info("%s is ready at %s", frame.name, frame.address, extra={"metrics_port": self.metrics_port})
        try:
            if self._settings.ready_fd is None:
                print(f"ready {frame.address}", flush=True)
            else:
                with os.fdopen(self._settings.ready_fd, "w", encoding="utf-8") as pipe:
                    pipe.write(json.dumps(news) + "\n")
        except OSError as error:
            _LOG.warning("nobody hears that %s is ready: %s", frame.name, error)


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    """Take the port; returns the address that others use. Raises OSError, BadFile."""
    add_port = server.add_insecure_port
    if (tls := server_tls(settings)) is not None:
        credentials = tls.credentials()

        def add_port(address: str) -> int:
            return server.add_secure_port(address, credentials)

    host, _, port = _taken_port(settings.listen, add_port).rpartition(":")
    advertised = settings.advertise or host
    if _IS_V6.search(advertised):
        advertised = f"[{advertised}]"
    return advertised if _HAS_PORT.search(advertised) else f"{advertised}:{port}"


def _taken_port(listen: str, add_port: Callable[[str], int]) -> str:
    """Takes a port with `add_port`; host:port as it is then. Raises OSError."""
    try:
        port = add_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: the port is taken or the host is not this machine's") from error
    return f"{listen.rpartition(':')[0]}:{port}"


def _limits(settings: ServerSettings) -> Limits:
    return Limits(
        receive_max_bytes=settings.receive_max_bytes,
        max_concurrent_streams=settings.max_connection_streams,
        max_metadata_bytes=settings.max_metadata_bytes,
        max_connection_age_s=settings.max_connection_age_s,
    )


def run(build: Build, settings: ServerSettings, kind: str) -> int:
    """Run a process of `kind` ("router", "prefill", "decode") until a signal; returns its exit code.

    What `build` makes is served on settings.listen. When something in the process can no longer be stopped, the
    interpreter ends here instead of returning.
    """
    logs = setup_logging(f"tandem-{kind}", settings.log_level, settings.log_format == "json")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code, process = runner.run(_serve(build, settings, kind))
            if process.stuck:
                logs.close()
                os._exit(code)
    finally:
        logs.close()
    if process.failure:  # after the log, whose lines come from another thread
        print(f"tandem {kind}: cannot start: {process.failure}", file=sys.stderr)
    return code


async def _serve(build: Build, settings: ServerSettings, kind: str) -> tuple[int, Process]:
    process = Process(build, settings, kind, owns_process=True)
    signals: list[int] = []

    def signalled(number: int) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        process.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    code = await process.run()
    return int(code), process


async def _until(waiting: Awaitable[Any], timeout_s: float) -> bool:
    """Await, at most `timeout_s`; False when it took longer and was cancelled. What it raises is logged and counts as an end."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiting
    except TimeoutError:
        return False
    except Exception:  # noqa: BLE001  (top of a process: the steps after it still have to run)
        _LOG.exception("a step of the shutdown failed")
    return True


def _version() -> str:
    try:
        return version("tandem-serving")
    except PackageNotFoundError:  # run from a plain checkout
        return "0"

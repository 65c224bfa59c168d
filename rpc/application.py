"""What a process that serves gRPC is made of: the frame that it is given and the application that it is."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import grpc

from rpc.admin import Books
from rpc.cell_identity import CellIdentity
from rpc.channels import internal_channel
from rpc.dialling import Dial
from rpc.gate import Gate
from rpc.security_settings import SecuritySettings
from rpc.server_settings import ServerSettings
from telemetry.registry import MetricsRegistry
from telemetry.tracing import Tracing


class ExitCode(IntEnum):
    """How a process ends. A second signal n ends it with 128 + n."""

    OK = 0
    START_FAILED = 1
    BAD_SETTINGS = 2
    CRASHED = 70
    DRAIN_CUT = 75


@dataclass(frozen=True, slots=True)
class Frame:
    """What a process is given: who it is, and where its news go."""

    kind: str
    name: str
    address: str  # host:port, as others reach it
    incarnation: str  # new at each start; tells which process it is (rpc.incarnation)
    settings: ServerSettings
    tracing: Tracing
    metrics: MetricsRegistry
    #: Ends the process with CRASHED; may be called in any thread, after its caller has told the streams.
    crashed: Callable[[BaseException], None]
    #: Whether a stop signal came.
    draining: Callable[[], bool]
    #: Opens channels to other processes of the cell.
    dial: Dial = internal_channel
    #: Who may call what.
    gate: Gate = field(default_factory=lambda: Gate(CellIdentity(SecuritySettings())))
    #: Where else the application listens, each as host:port by the name that the ready news have for it.
    addresses: dict[str, str] = field(default_factory=dict)


class Application(Protocol):
    """What a process does. All but `stalled` is called on the event loop."""

    @property
    def service_names(self) -> Sequence[str]:
        """Full names of the services that `add_to` adds."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicers; nothing calls them before `start` has returned."""

    async def start(self) -> None:
        """Load and start whatever is needed; on return the process is ready."""

    def stalled(self, now: float) -> bool:
        """Whether the work stands still although there is some; `now` is a reading of the monotonic clock."""

    async def check(self) -> Books:
        """Recount everything that is held."""

    def begin_drain(self) -> None:
        """Refuse new work from now on; what runs, runs on."""

    async def drained(self) -> None:
        """Return when nothing runs any more. Cancelled when the budget is over."""

    async def stop(self) -> None:
        """End what still runs with a typed error, and release everything; also after a `start` that failed."""


def lasting(task: "asyncio.Task[None]", crashed: Callable[[BaseException], None]) -> "asyncio.Task[None]":
    """A task that has to run as long as the process: when it breaks, the process ends. (Nobody awaits such a task.)"""

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            crashed(fault)

    task.add_done_callback(ended)
    return task


Build = Callable[[Frame], Application]

"""AdminService: a recount of everything a process holds, for operators and tests."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.pools.v1 import member_pb2, member_pb2_grpc

SERVICE_NAME = "tandem.pools.v1.AdminService"


@dataclass(frozen=True, slots=True)
class Books:
    """What is held, by name, and sentences about what does not add up (none when all is well)."""

    books: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


class AdminServicer(member_pb2_grpc.AdminServiceServicer):
    """Answers Check with what `check` finds."""

    def __init__(self, check: Callable[[], Awaitable[Books]]) -> None:
        self._check = check

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  (the name is the RPC's)
        """Recount."""
        found = await self._check()
        return member_pb2.CheckResponse(books=dict(found.books), faults=list(found.faults))

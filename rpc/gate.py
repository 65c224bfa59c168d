"""Who may call which service of a process, decided before anything is looked at but the caller's proofs.

Health is open to all. Services of the pools are for processes of the cell, AdminService for those and for operators,
reflection for all who are known. What a router offers to clients it guards itself, for it has to know whose a call is.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rpc import admin
from rpc.cell_identity import CellIdentity, bearer
from rpc.status import permission_denied, unauthenticated

#: The role of those who may see and end everybody's requests, and look into processes.
OPERATOR = "operator"
POOLS = "tandem.pools.v1."
REFLECTION = "grpc.reflection."


class Kind(Enum):
    """What a caller is."""

    ANYBODY = "anybody"
    """Nobody is asked who he is."""
    STRANGER = "stranger"
    """Processes of the cell prove who they are, clients need not; this one did not."""
    CELL = "cell"
    """A process of the cell."""
    CLIENT = "client"
    """A client with a token of a tenant."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as it was proved. `name` is for logs; it is never the token."""

    kind: Kind = Kind.ANYBODY
    name: str = ""
    tenant: str = ""
    roles: frozenset[str] = frozenset()

    @property
    def operator(self) -> bool:
        """Whether everybody's requests may be seen and ended."""
        return self.kind is not Kind.CLIENT or OPERATOR in self.roles

    @property
    def may_forward(self) -> bool:
        """Whether it is believed that a call is passed on, and for whom."""
        return self.kind in (Kind.ANYBODY, Kind.CELL)

    def may_touch(self, tenant: str) -> bool:
        """Whether requests of `tenant` are there for this caller."""
        return self.operator or self.tenant == tenant


ANYBODY = Caller()
STRANGER = Caller(Kind.STRANGER)

#: Who the client with this token is. Raises StatusError (UNAUTHENTICATED).
KnowClient = Callable[[str], Awaitable[Caller]]


class Gate:
    """Asks callers of one process who they are. `know_client` is set where clients have tokens."""

    def __init__(self, identity: CellIdentity) -> None:
        self.identity = identity
        self.know_client: KnowClient | None = None

    async def client(self, context: Any) -> Caller:
        """Who calls a service for clients. Raises StatusError (UNAUTHENTICATED) where clients have to be known."""
        if self.identity.required and self.identity.proves(context):
            return Caller(Kind.CELL, "cell")
        if self.know_client is not None:
            return await self.know_client(bearer(context.invocation_metadata()))
        return STRANGER if self.identity.required else ANYBODY

    async def admit(self, method: str, context: Any) -> None:
        """Lets a call of "package.Service/Method" in. Raises StatusError (UNAUTHENTICATED, PERMISSION_DENIED)."""
        service = method.partition("/")[0]
        if not service.startswith((POOLS, REFLECTION)):
            return
        caller = await self.client(context)
        if caller.kind in (Kind.ANYBODY, Kind.CELL):
            return
        if caller.kind is Kind.STRANGER:
            # A certificate that is none of the cell's is known, and allowed nothing here.
            if context.auth_context().get("x509_pem_cert"):
                raise permission_denied("the certificate's names are none of this cell's", "NOT_OF_THE_CELL")
            raise unauthenticated("this service is for processes of the cell: the call carries no proof of being from one")
        if service.startswith(REFLECTION):
            return
        if service != admin.SERVICE_NAME:
            raise permission_denied("this service is for processes of the cell", "NOT_OF_THE_CELL")
        if not caller.operator:
            raise permission_denied(f"this needs the role {OPERATOR}", "OPERATOR_ONLY")

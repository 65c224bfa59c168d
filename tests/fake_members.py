"""Members for router tests: real gRPC servers that speak the pools' port and do what a test scripts.

The hand-over between them is a call inside this process: a prefill fake that finishes a grant tells the decode fake, which
commits. Nothing is kinder than the real thing: seats live as long as their stream and its hold, incarnations are checked.
"""

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from tandem.pools.v1 import grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.fake_decode import FakeDecode
from tests.fake_member import SNAPSHOT, FakeMember, Gate

__all__ = ["SNAPSHOT", "FakeDecode", "FakePrefill", "PrefillScript", "fake_pools"]


@dataclass
class PrefillScript:
    """What the prefill fake does with its next jobs."""

    compute: Gate = field(default_factory=Gate)
    failures: deque[prefill_pb2.PrefillFailed | grpc.StatusCode] = field(default_factory=deque)
    #: As `failures`, but everything was written before.
    late_failures: deque[prefill_pb2.PrefillFailed | grpc.StatusCode] = field(default_factory=deque)


class FakePrefill(FakeMember, prefill_pb2_grpc.PrefillServiceServicer, member_pb2_grpc.MemberServiceServicer):
    """A prefill member that hands over to `decodes`."""

    role = member_pb2.MEMBER_ROLE_PREFILL

    def __init__(self, name: str, decodes: list[FakeDecode]) -> None:
        super().__init__(name)
        self.script = PrefillScript()
        self.jobs: set[bytes] = set()
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self._decodes = decodes

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        self.requests.append(request)
        grant_id = request.grant.grant_id
        self.jobs.add(grant_id)
        try:
            accepted = prefill_pb2.PrefillAccepted(queued_tokens=0)
            await context.write(prefill_pb2.PrefillResponse(accepted=accepted))
            await self.script.compute.passed()
            if self.script.failures:
                await self._fail(self.script.failures.popleft(), context)
                return
            for decode in self._decodes:
                if grant_id in decode.grants:
                    decode.grants.pop(grant_id).committed.set()
            if self.script.late_failures:
                await self._fail(self.script.late_failures.popleft(), context)
                return
            committed = prefill_pb2.PrefillCommitted(
                sent_bytes=1000, queue_s=0.001, compute_s=0.004, handover_s=0.003, exposed_s=0.001, post_s=0.0005
            )
            await context.write(prefill_pb2.PrefillResponse(committed=committed))
        finally:
            self.jobs.discard(grant_id)

    async def _fail(self, failure: prefill_pb2.PrefillFailed | grpc.StatusCode, context: grpc.aio.ServicerContext) -> None:
        if isinstance(failure, grpc.StatusCode):
            await context.abort(failure, "scripted")
        await context.write(prefill_pb2.PrefillResponse(failed=failure))


@asynccontextmanager
async def fake_pools(
    prefills: int = 1,
    decodes: int = 1,
    decode_info: dict[str, object] | None = None,
    adapters: Mapping[str, dict[str, str]] | None = None,
) -> AsyncIterator[tuple[list[FakePrefill], list[FakeDecode]]]:
    """Started fakes; `decode_info` changes what the decode members say they are; `adapters`: identities by name, by
    member."""
    decode = [FakeDecode(f"decode-{number}") for number in range(decodes)]
    for one in decode:
        one.peers = decode
    prefill = [FakePrefill(f"prefill-{number}", decode) for number in range(prefills)]
    for one in decode:
        one.info_changes.update(decode_info or {})
    members: list[FakeMember] = [*decode, *prefill]
    for member in members:
        member.adapters += [grant_pb2.Adapter(name=n, identity=i) for n, i in (adapters or {}).get(member.name, {}).items()]
    try:
        for member in members:
            await member.start()
        yield prefill, decode
    finally:
        for member in members:
            await member.stop()

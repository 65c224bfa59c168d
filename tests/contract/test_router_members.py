"""A router's links to its members, on real gRPC."""

import asyncio

from router.member_link import LinkSettings, Role
from router.members import Members, MembersSettings
from rpc.channels import internal_channel
from tests.fake_members import fake_pools
from tests.router_world import MODEL


async def test_a_link_that_breaks_by_a_fault_of_ours_is_a_crash() -> None:
    """Else its member would stay as it was at its last news, for good."""
    crashes: asyncio.Queue[BaseException] = asyncio.Queue()
    fault = RuntimeError("nobody can look")

    def look() -> None:
        raise fault

    async with fake_pools(0, 1, None) as (_, (decode,)):
        targets = {Role.PREFILL: (), Role.DECODE: (decode.address,)}
        members = Members(MembersSettings(targets, LinkSettings("router")), MODEL, look, crashes.put_nowait, internal_channel)
        await members.start()
        assert await asyncio.wait_for(crashes.get(), 10) is fault
        await members.close()

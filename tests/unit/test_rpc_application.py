"""Tasks that have to run as long as the process."""

import asyncio

from rpc.application import lasting


async def test_a_lasting_task_that_breaks_is_the_processes_crash() -> None:
    crashes: list[BaseException] = []
    fault = ValueError("broken")

    async def breaks() -> None:
        raise fault

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = [lasting(asyncio.create_task(work), crashes.append) for work in (breaks(), waits())]
    await asyncio.wait(tasks[:1])
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert crashes == [fault], "being cancelled is an end in order"

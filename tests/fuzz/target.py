"""What is fuzzed: a world that is attacked case by case, and has to be as it was afterwards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

#: A call that takes longer, in seconds, hangs; machines may be busy.
HANG_S = 60.0
#: Most responses that are read of one call.
RESPONSES_MAX = 200
#: Statuses that say that something of ours broke.
BROKEN = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


@dataclass(frozen=True, slots=True)
class Attacked:
    """A world under attack: `attack` tries one case, `at_rest` finds that nothing is left of all. Both raise AssertionError."""

    attack: Callable[[Any], Awaitable[None]]
    at_rest: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """Something to fuzz. `open` makes its world anew."""

    name: str
    cases: st.SearchStrategy[Any]
    open: Callable[[], AbstractAsyncContextManager[Attacked]]


def run(target: Target, number: int, examples: int) -> None:
    """Tries so many cases, drawn with the seed `number`; raises what the smallest case raises that fails."""
    with asyncio.Runner() as runner:
        world = target.open()
        attacked = runner.run(world.__aenter__())
        try:

            @seed(number)
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                print_blob=False,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            @given(target.cases)
            def attempt(case: Any) -> None:
                runner.run(_within(attacked.attack(case), "the case"))

            attempt()
            runner.run(_within(attacked.at_rest(), "coming to rest"))
        finally:
            runner.run(world.__aexit__(None, None, None))


def pure(check: Callable[[Any], None]) -> Callable[[], AbstractAsyncContextManager[Attacked]]:
    """The world of something that keeps nothing: `check` is called with each case."""

    async def attack(case: Any) -> None:
        check(case)

    async def at_rest() -> None:
        pass

    @asynccontextmanager
    async def world() -> AsyncIterator[Attacked]:
        yield Attacked(attack, at_rest)

    return world


async def answered(call: Any, most: int = RESPONSES_MAX) -> grpc.StatusCode:
    """Reads a call to its end, or cancels it after so many responses; its status, which must say nothing of a broken server."""
    try:
        if hasattr(call, "read"):
            for _ in range(most):
                if await call.read() is grpc.aio.EOF:
                    break
            else:
                call.cancel()
                return grpc.StatusCode.CANCELLED
        else:
            await call
    except grpc.aio.AioRpcError as error:
        # What gRPC's client says of itself, when it wrote on a call that the server had ended meanwhile.
        if error.details() != "Internal error from Core":
            assert error.code() not in BROKEN, f"{error.code().name}: {error.details()}"
        return error.code()
    return grpc.StatusCode.OK


async def _within(awaitable: Awaitable[None], what: str) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} hangs: no end after {HANG_S:g} s") from None

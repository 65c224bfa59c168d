"""What one client sees of one stream, with the times at which it saw it."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from rpc.channels import client_options
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

#: Longest wait for anything that a benchmark expects of a stream, in seconds.
PATIENCE_S = 120.0
#: A client that does not read lets the server send this much ahead, in bytes.
NARROW = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))


class NeverCame(Exception):
    """Something that a benchmark waited for did not happen. The message says what."""


def prompt_request(first_id: int, prompt_tokens: int, output_tokens: int) -> pb.GenerateRequest:
    """Greedy tokens after `prompt_tokens` ids that no other `first_id` shares; end tokens do not end."""
    return pb.GenerateRequest(
        request_id=f"bench-{secrets.token_hex(8)}",
        tokens=pb.TokenPrompt(ids=[1000 + (first_id * 7919 + 31 * position) % 40_000 for position in range(prompt_tokens)]),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=output_tokens,
        utf8_policy=pb.UTF8_POLICY_DROP,
    )


@dataclass(slots=True)
class Timeline:
    """One stream so far. `tokens`: (arrival, tokens in it) of each delta, by the monotonic clock."""

    request_id: str
    asked_at: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    completed: pb.Completed | None = None
    ended_at: float = 0.0
    failure: str = ""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return bool(self.ended_at)

    def gaps_s(self) -> list[float]:
        """Between tokens; a delta of k tokens counts as k gaps of a k-th each."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [gap for (before, _), (at, count) in pairs for gap in [(at - before) / max(1, count)] * max(1, count)]

    def longest_gap_s(self, since: float) -> float:
        """Between two deltas of which the second came after `since`; 0 when none did."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return max((at - before for (before, _), (at, _) in pairs if at > since), default=0.0)

    def first_after(self, moment: float) -> float | None:
        """Arrival of the first delta after a moment."""
        return next((at for at, _ in self.tokens if at > moment), None)

    async def until_deltas(self, count: int) -> None:
        """Until so many deltas have come. Raises NeverCame."""
        await self._until(lambda: len(self.tokens) >= count, f"{count} deltas")

    async def until_after(self, moment: float) -> float:
        """Arrival of the first delta after a moment. Raises NeverCame."""
        await self._until(lambda: self.first_after(moment) is not None, "another delta")
        found = self.first_after(moment)
        assert found is not None
        return found

    async def until_end(self) -> None:
        """Until the call has ended. Raises NeverCame."""
        await self._until(lambda: self.over, "the end")

    async def _until(self, there: Any, what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not there():
                    if self.over:
                        raise NeverCame(f"{self.request_id}: {what} never came; it ended: {self.failure or self.completed}")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise NeverCame(f"{self.request_id}: {what} never came within {PATIENCE_S:g} s") from None

    async def read(self, call: Any, stop_after: int | None = None) -> None:
        """Follow a call to its end. `stop_after`: reads no more after so many deltas, until it is cancelled."""
        try:
            async for event in call:
                now, kind = time.monotonic(), event.WhichOneof("event")
                if kind == "delta":
                    self.tokens.append((now, len(event.delta.token_ids)))
                elif kind == "completed":
                    self.completed = event.completed
                self._news.set()
                if stop_after is not None and len(self.tokens) >= stop_after:
                    await asyncio.Event().wait()
        except grpc.aio.AioRpcError as error:
            self.failure = f"{error.code().name}: {error.details()}"
        finally:
            self.ended_at = time.monotonic()
            self._news.set()


@asynccontextmanager
async def streams(
    address: str, requests: Sequence[pb.GenerateRequest], stop_after: int | None = None
) -> AsyncIterator[list[Timeline]]:
    """Runs requests side by side inside the block; what still runs at its end is left. `stop_after`: as in Timeline.read."""
    options = [*client_options(), *(NARROW if stop_after is not None else ()), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)
        timelines = [Timeline(request.request_id, time.monotonic()) for request in requests]
        calls = [stub.Generate(request) for request in requests]
        reading = [asyncio.create_task(timeline.read(call, stop_after)) for timeline, call in zip(timelines, calls, strict=True)]
        try:
            yield timelines
        finally:
            for call in calls:
                call.cancel()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

"""Closed-loop load on a gRPC door, and what each request saw."""

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.client import connect

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random token ids of one length, answers of one length (end tokens are ignored), chosen greedily."""

    prompt_tokens: int
    output_tokens: int
    first_id: int
    vocabulary_size: int

    def request(self, rng: random.Random) -> pb.GenerateRequest:
        """A request that no other one resembles."""
        ids = [rng.randrange(self.first_id, self.vocabulary_size) for _ in range(self.prompt_tokens)]
        return pb.GenerateRequest(
            request_id=f"bench-{secrets.token_hex(8)}",
            tokens=pb.TokenPrompt(ids=ids),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopParams(ignore_eos=True),
            max_output_tokens=self.output_tokens,
            # Answers to random tokens are not always text.
            utf8_policy=pb.UTF8_POLICY_DROP,
        )


@dataclass(slots=True)
class Seen:
    """What the client of one request saw; times are seconds."""

    first_delta_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    selected_tokens: int = 0
    timings: pb.Timings | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run at one concurrency."""

    concurrency: int
    seconds: float
    requests: tuple[Seen, ...]

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of all requests over the whole run."""
        return sum(seen.selected_tokens for seen in self.requests) / self.seconds

    def first_delta_s(self) -> list[float]:
        """Time to first token of each request."""
        return [seen.first_delta_s for seen in self.requests if not seen.failure]

    def gaps_s(self) -> list[float]:
        """Inter-token times of all requests; a delta of k tokens counts as k gaps of a k-th each."""
        return [gap for seen in self.requests for gap in seen.gaps_s]

    def failures(self) -> list[str]:
        """Failures, one sentence each."""
        return [seen.failure for seen in self.requests if seen.failure]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run_closed_loop(address: str, workload: Workload, concurrency: int, requests: int, seed: int) -> Measured:
    """`concurrency` clients, each sending its next request when the last has ended, `requests` in all."""
    rng = random.Random(seed)
    queue = [workload.request(rng) for _ in range(requests)]
    seen: list[Seen] = []

    async def client(stub: pb_grpc.InferenceServiceStub) -> None:
        while queue:
            seen.append(await _one(stub, queue.pop()))

    async with connect(address) as stub:
        started = time.perf_counter()
        await asyncio.gather(*(client(stub) for _ in range(concurrency)))
        return Measured(concurrency, time.perf_counter() - started, tuple(seen))


async def _one(stub: pb_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> Seen:
    seen, started = Seen(), time.perf_counter()
    last = started
    try:
        async for response in stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
            now = time.perf_counter()
            kind = response.WhichOneof("event")
            if kind == "delta":
                if not seen.first_delta_s:
                    seen.first_delta_s = now - started
                else:
                    count = max(1, len(response.delta.token_ids))
                    seen.gaps_s += [(now - last) / count] * count
                last = now
            elif kind == "completed":
                seen.selected_tokens = response.completed.usage.selected_tokens
                seen.timings = response.completed.timings
                if response.completed.finish_reason != pb.FINISH_REASON_MAX_OUTPUT_TOKENS:
                    seen.failure = f"{request.request_id} ended with {pb.FinishReason.Name(response.completed.finish_reason)}"
    except Exception as error:  # noqa: BLE001  (a failed request is a figure of the run, not its end)
        seen.failure = f"{request.request_id}: {error}"
    return seen

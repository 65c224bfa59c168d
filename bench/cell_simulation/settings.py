"""What one simulated cell is made of. Everything that the code has a setting for has its default here unless a run says so."""

from dataclasses import dataclass, field
from enum import Enum

from bench.cell_simulation.service_times import ServiceTimes
from decode_svc.preemption import PressureLimits
from router.placement import COMPARED
from router.queue import QueueLimits


class Policy(Enum):
    """How requests are served."""

    TANDEM = "tandem"
    """Two pools, members by placement."""
    ROUND_ROBIN = "round robin"
    """Two pools, members in turn: the next of each pool that has room."""
    AGGREGATED = "aggregated"
    """One pool of the same size, whose members compute prompts themselves; members by placement."""


@dataclass(frozen=True, slots=True)
class Targets:
    """When a request was served well. The first token may take `first_token_s` and `idle_factor` times what its prompt takes
    alone on an idle device; all inter-token times but a share of `late_share` may take `inter_token_s`."""

    first_token_s: float = 2.0
    idle_factor: float = 2.0
    inter_token_s: float = 0.05
    late_share: float = 0.01


@dataclass(frozen=True, slots=True)
class CellSettings:
    """Sizes, seconds. `max_output_tokens`: what clients name; they get what the trace says.

    news_s: between two looks at a member's load. hop_s: a message from process to process. endpoint_s: making the agent that
    receives from one more prefill member. queue_clock_s: who waits longer has failed. queue_share: of it that one may have to
    wait to be let in. refuses_waits: whether others are refused as they come. patience_s: a refused client comes back when it was
    told to, and gives up when that is later than this after it first came; the default is that of a request's overall clock.
    """

    policy: Policy = Policy.TANDEM
    prefill_members: int = 160
    decode_members: int = 96
    routers: int = 2
    service: ServiceTimes = field(default_factory=ServiceTimes)
    targets: Targets = field(default_factory=Targets)
    page_tokens: int = 64
    prefill_step_tokens: int = 8192
    prefill_step_sequences: int = 16
    prefill_queued_tokens: int = 262_144
    decode_sequences: int = 128
    decode_step_sequences: int = 64
    mixed_prompt_tokens: int = 512
    pressure: PressureLimits = field(default_factory=PressureLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    compared: int = COMPARED
    max_output_tokens: int = 2000
    news_s: float = 0.05
    hop_s: float = 0.0005
    endpoint_s: float = 0.06
    fence_s: float = 0.01
    queue_clock_s: float = 30.0
    queue_share: float = 0.33
    refuses_waits: bool = True
    patience_s: float = 600.0
    seed: int = 1

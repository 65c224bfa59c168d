"""The bounds of a decode member's scheduler: values. Pure."""

from dataclasses import dataclass, field

from decode_svc.flow import WindowSizes
from decode_svc.planning import StepLimits
from decode_svc.preemption import PressureLimits
from decode_svc.speculation import SpeculationLimits


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds. `sequences`: seats at once, waiting or running. stream_bytes, coalesce_bytes: see WindowSizes.

    release_wait_s: how long an ending waits, in seconds, for its writer's answer, so that it can say what was released.
    keep_generated: whether generated pages stay in the prefix cache, beside those of prompts.
    """

    sequences: int = 64
    stream_bytes: int = 64 * 1024
    release_wait_s: float = 2.0
    step: StepLimits = field(default_factory=StepLimits)
    pressure: PressureLimits = field(default_factory=PressureLimits)
    coalesce_bytes: int = 1024 * 1024
    speculation: SpeculationLimits = field(default_factory=SpeculationLimits)
    keep_generated: bool = True

    @property
    def windows(self) -> WindowSizes:
        """How much output may wait for a reader."""
        return WindowSizes(self.stream_bytes, self.coalesce_bytes)

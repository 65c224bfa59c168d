"""What a step costs on one accelerator: a roofline over published figures, with the efficiencies written down beside them.

A step reads all weights once (or multiplies by them, whichever takes longer), reads the KV of every sequence in it, and
computes attention for prompt chunks. docs/simulation.md names the sources and says what the result depends on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class StepRow(Protocol):
    """The rows of one sequence in a step, as engine.batch.Rows."""

    token_ids: object
    first_position: int


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak figures of one device, and the shares of them that a good engine reaches. Bytes, seconds, operations a second."""

    name: str
    matrix_flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    network_bytes_per_s: float
    compute_share: float = 0.55
    memory_share: float = 0.75
    network_share: float = 0.8


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder model in 16 bit."""

    name: str
    parameters: float
    layers: int
    query_width: int
    kv_heads: int
    head_dim: int
    context_tokens: int

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return 2 * self.parameters


#: NVIDIA H100 SXM5, its data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB; one 400 Gbit/s port for each device.
H100 = Accelerator("H100 SXM5 80 GB", 989e12, 3.35e12, 80e9, 50e9)
#: Llama 3.1 8B, its published configuration: 8.03 G parameters, 32 layers, width 4096, 8 KV heads of 128.
LLAMA_8B = Model("Llama 3.1 8B", 8.03e9, 32, 4096, 8, 128, 131_072)
#: Launches, sampling and host work of a step that a device does not hide, in seconds.
STEP_OVERHEAD_S = 0.0015
#: Share of the memory that is left for weights and KV, as vLLM's gpu_memory_utilization has it, and bytes of activations.
MEMORY_FOR_MODEL = 0.9
ACTIVATION_BYTES = 4e9


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Times of one device with one model."""

    device: Accelerator = H100
    model: Model = LLAMA_8B
    overhead_s: float = STEP_OVERHEAD_S

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        room = self.device.memory_bytes * MEMORY_FOR_MODEL - self.model.weight_bytes - ACTIVATION_BYTES
        return int(room / self.model.kv_token_bytes)

    def step_s(self, rows: Iterable[StepRow]) -> float:
        """One step of these rows."""
        tokens = kv_tokens = attended = 0.0
        for row in rows:
            count = len(row.token_ids)  # type: ignore[arg-type]
            tokens += count
            kv_tokens += row.first_position + count
            attended += count * (row.first_position + 0.5 * count)
        device, model = self.device, self.model
        flops = device.matrix_flops * device.compute_share
        bytes_per_s = device.memory_bytes_per_s * device.memory_share
        matrices_s = max(model.weight_bytes / bytes_per_s, 2 * model.parameters * tokens / flops)
        attention_s = max(kv_tokens * model.kv_token_bytes / bytes_per_s, 4 * model.layers * model.query_width * attended / flops)
        return self.overhead_s + matrices_s + attention_s

    def prompt_s(self, tokens: int, chunk_tokens: int) -> float:
        """A prompt alone on an idle device, in chunks."""
        return sum(
            self.step_s([_Chunk(range(min(chunk_tokens, tokens - first)), first)]) for first in range(0, tokens, chunk_tokens)
        )

    def send_s(self, tokens: float) -> float:
        """Writing the KV of so many tokens over an idle network."""
        return tokens * self.model.kv_token_bytes / (self.device.network_bytes_per_s * self.device.network_share)


@dataclass(frozen=True, slots=True)
class _Chunk:
    token_ids: range
    first_position: int

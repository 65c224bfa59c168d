"""The model as the rest of a member sees it: pages in, one step, logits out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from engine.backend import AUTO, Registry, Setup
from engine.backend_check import BACKENDS, choose_backend
from engine.batch import Batch
from engine.layout import GroupKind, GroupLayout, Layout
from engine.llama import Decoder
from engine.rope import rope_table
from engine.slab import Slab, SlabMemory, allocate_slab
from engine.step import StepLimits, build_step
from engine.weights import LoadProgress, WeightLoader, WeightSource
from engine.weights_gguf import GgufSource
from engine.weights_safetensors import SafetensorsSource
from models import load_config
from models.config import ModelConfig
from models.errors import UnsupportedModel
from models.ref import ModelRef

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MIN_PAGES = 2
MAX_THREADS = 1024


class ModelError(RuntimeError):
    """A step could not be computed. The KV rows of its sequences are unknown; their requests end with model_error."""


class Runner(Protocol):
    """One loaded model over its KV slabs. Owned by one thread."""

    @property
    def layout(self) -> Layout: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def slabs(self) -> tuple[SlabMemory, ...]:
        """One slab per KV group, in the order of layout.groups; a unit is a page, page 0 is the null page."""
        ...

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the KV of every row into its pages and return logits.

        Returns float32 [R, vocabulary_size] on the host: one row for each Rows with wants_logits, in the order of the batch.
        Raises ModelError when the step fails, ValueError when the batch breaks a limit (nothing was written then).
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Since load: steps that ran, rows they computed, and steps that raised."""

    steps: int
    rows: int
    failed_steps: int


class ModelRunner:
    """Implements Runner with a real model on one device."""

    def __init__(self, decoder: Decoder, layout: Layout, slab: Slab, limits: StepLimits, backend: str) -> None:
        self._decoder = decoder
        self._slab = slab
        self._limits = limits
        self._steps = self._rows = self._failed_steps = 0
        self.layout = layout
        self.slabs: tuple[SlabMemory, ...] = (slab.memory,)
        self.vocabulary_size = limits.vocabulary_size
        self.context_tokens = limits.context_tokens
        self.backend = backend

    @classmethod
    def load(
        cls,
        ref: ModelRef,
        *,
        dtype: str,
        page_tokens: int = 16,
        total_pages: int,
        threads: int,
        backend: str = AUTO,
        device: str = "cpu",
        progress: Callable[[LoadProgress], None] | None = None,
        registry: Registry = BACKENDS,
    ) -> Self:
        """Read the weights, take the KV memory and choose a backend.

        dtype: "bfloat16" or "float32", of weights, activations and KV. total_pages: with the null page.
        threads: of torch in this whole process. Raises ValueError for a setting outside its limits, UnsupportedModel,
        WeightsError, BackendUnfit, and MemoryError when the pages do not fit.
        """
        _check_settings(dtype, total_pages, threads)
        torch.set_num_threads(threads)
        config = load_config(ref)
        _refuse_window(config)
        place = torch.device(device)
        layout = Layout(ref.snapshot, (_group(config, page_tokens, dtype),))
        slab = allocate_slab(total_pages, layout.groups[0].page_bytes, device)
        setup = _setup(config, layout.groups[0], slab, place)
        chosen = choose_backend(registry, backend, setup)
        with torch.inference_mode():
            weights = WeightLoader(_source(ref, config), config, chosen, place, DTYPES[dtype]).load(progress)
        limits = StepLimits(config.vocabulary_size, config.context_tokens, page_tokens, total_pages)
        return cls(Decoder(weights, chosen), layout, slab, limits, chosen.name)

    def run(self, batch: Batch) -> torch.Tensor:
        step = build_step(batch, self._limits)
        try:
            with torch.inference_mode():
                logits = self._decoder.forward(step).to("cpu")
        except (RuntimeError, MemoryError) as error:
            self._failed_steps += 1
            raise ModelError(f"a step of {batch.scheduled_sequences} sequences failed: {error}") from error
        self._steps += 1
        self._rows += batch.scheduled_tokens
        return logits

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(self._steps, self._rows, self._failed_steps)


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Whether each row of float32 [R, V] logits can be sampled: its largest value is finite (a NaN anywhere shows up there)."""
    if logits.shape[0] == 0:
        return []
    finite: list[bool] = torch.isfinite(logits.amax(dim=-1)).tolist()
    return finite


def _check_settings(dtype: str, total_pages: int, threads: int) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(sorted(DTYPES))}")
    if total_pages < MIN_PAGES:
        raise ValueError(f"total_pages is {total_pages}; the least is {MIN_PAGES}, as page 0 is never handed out")
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads is {threads}; the limits are 1 and {MAX_THREADS}")


def _refuse_window(config: ModelConfig) -> None:
    if config.sliding_window is not None and config.sliding_window < config.context_tokens:
        raise UnsupportedModel(
            f"the model attends to the last {config.sliding_window} tokens only, of a context of {config.context_tokens}; "
            "sliding windows are not supported, choose a model with full attention"
        )


def _group(config: ModelConfig, page_tokens: int, dtype: str) -> GroupLayout:
    return GroupLayout(GroupKind.FULL, config.layers, config.kv_heads, config.head_dim, page_tokens, dtype)


def _setup(config: ModelConfig, group: GroupLayout, slab: Slab, device: torch.device) -> Setup:
    dtype = DTYPES[group.dtype]
    pages = slab.memory.units
    shape = (pages, group.layers, group.page_tokens, 2, group.kv_heads, group.head_dim)
    reachable = min(config.context_tokens, (pages - 1) * group.page_tokens)
    return Setup(
        device=device,
        dtype=dtype,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        pool=slab.data.view(dtype).view(shape),
        rope=rope_table(config.rope, config.head_dim, reachable).to(device),
    )


def _source(ref: ModelRef, config: ModelConfig) -> WeightSource:
    return GgufSource(ref.path, config) if ref.format == "gguf" else SafetensorsSource(ref.path)

"""The model as the rest of a member sees it: pages in, one step, logits out."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from engine.adapters import AdapterFolder, load_adapters
from engine.backend import AUTO, Registry
from engine.backend_check import BACKENDS, choose_backends
from engine.batch import Batch, LayerMarks
from engine.core_share import NO_LOAN, Cores, Loan, OwnCores
from engine.kernels import bound_kernels
from engine.kv_groups import DTYPES, KvGroup, group_setup, kv_groups, layer_places, positions_text
from engine.layout import GroupLayout, Layout
from engine.llama import Decoder
from engine.load_plan import Loaded, LoadPlan, StepDecoder
from engine.module_loading import load_modules
from engine.quantisation import WeightQuantisation, parse_quantisation
from engine.slab import Slab, SlabMemory, allocate_slab
from engine.step import StepLimits, build_steps
from engine.weights import LoadProgress, WeightLoader, WeightSource
from engine.weights_gguf import GgufSource
from engine.weights_safetensors import SafetensorsSource
from lifecycle.adapters import Adapter
from models import load_config
from models.config import ModelConfig
from models.module_config import ModuleConfig
from models.ref import ModelRef

MIN_PAGES = 2
MAX_THREADS = 1024


class ModelError(RuntimeError):
    """A step could not be computed. The KV rows of its sequences are unknown; their requests end with model_error."""


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Since load: steps that ran, rows they computed, and steps that raised.

    model_part_seconds: where the time of steps went, by part of the model; empty where the backend does not count it.
    lent_steps: those that used threads of other members, see engine.core_share. recalled_steps: those of them that had to give
        them back before they were done.
    """

    steps: int
    rows: int
    failed_steps: int
    model_part_seconds: Mapping[str, float] = field(default_factory=dict)
    lent_steps: int = 0
    recalled_steps: int = 0


class Runner(Protocol):
    """One loaded model over its KV slabs. Owned by one thread."""

    @property
    def layout(self) -> Layout: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that rows may name."""
        ...

    @property
    def slabs(self) -> tuple[SlabMemory, ...]:
        """One slab per KV group, in the order of layout.groups; a unit is a page, page 0 is the null page."""
        ...

    @property
    def slab_data(self) -> tuple[torch.Tensor, ...]:
        """The bytes of the slabs: uint8, one dimension each, on the model's device."""
        ...

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        """Write the KV of every row into its pages and return logits.

        Returns float32 [R, vocabulary_size] on the host, in the order of the batch: one row for each Rows with wants_logits, for
        each token of those with all_logits or drafts. Drafts change no bit of another row, nor of their first token's.
        Raises ModelError when the step fails, ValueError when the batch breaks a limit (nothing was written then).
        """
        ...

    def rest(self) -> None:
        """There is nothing to compute for now."""
        ...

    def statistics(self) -> RunnerStatistics:
        """May be called from any thread."""
        ...


class ModelRunner:
    """Implements Runner with a real model on one device."""

    def __init__(
        self,
        decoder: StepDecoder,
        layout: Layout,
        slabs: Sequence[Slab],
        limits: Sequence[StepLimits],
        backend: str,
        cores: Cores | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """slabs, limits: one for each KV group. cores: what steps may use beside their own threads. adapters: the decoder's."""
        self.decoder = decoder
        self._cores = cores or OwnCores()
        self._limits = tuple(limits)
        self._on_host = all(slab.data.device.type == "cpu" for slab in slabs)
        self._steps = self._rows = self._failed_steps = self._lent_steps = self._recalled_steps = 0
        self.layout = layout
        self.slabs: tuple[SlabMemory, ...] = tuple(slab.memory for slab in slabs)
        self.slab_data: tuple[torch.Tensor, ...] = tuple(slab.data for slab in slabs)
        self.vocabulary_size = limits[0].vocabulary_size
        self.context_tokens = limits[0].context_tokens
        self.backend = backend
        self.adapters = tuple(adapters)

    @classmethod
    def load(
        cls,
        ref: ModelRef,
        *,
        dtype: str,
        weight_quantisation: str = WeightQuantisation.OFF,
        page_tokens: int = 16,
        total_pages: int,
        window_pages: Callable[[GroupLayout], int] | None = None,
        threads: int,
        backend: str = AUTO,
        device: str = "cpu",
        progress: Callable[[LoadProgress], None] | None = None,
        registry: Registry = BACKENDS,
        cores: Cores | None = None,
        adapters: Sequence[AdapterFolder] = (),
    ) -> Self:
        """Read the weights, take the KV memory and choose a backend.

        dtype: "bfloat16" or "float32", of weights, activations and KV. weight_quantisation: "off", or "int8" for the matrices of
        linear layers and of the logits. total_pages: of each KV group, with the null page;
        window_pages: says it for a group behind a window.
        threads: of torch in this whole process. adapters: those that rows may name. Raises ValueError for a setting outside its
        limits, UnsupportedModel, WeightsError, AdapterError, BackendUnfit, and MemoryError when the pages do not fit.
        """
        _check_settings(dtype, total_pages, threads)
        torch.set_num_threads(threads)
        bound_kernels()
        config, quantisation = load_config(ref), parse_quantisation(weight_quantisation)
        groups = kv_groups(config, page_tokens, dtype)
        layout = Layout(ref.snapshot, tuple(group.layout for group in groups), positions_text(config, groups), quantisation.value)
        counts = [total_pages if group.window is None or not window_pages else window_pages(group) for group in layout.groups]
        slabs = tuple(allocate_slab(count, group.page_bytes, device) for count, group in zip(counts, layout.groups, strict=True))
        reach = _reach(config.context_tokens, groups, slabs)
        plan = LoadPlan(
            ref, torch.device(device), DTYPES[dtype], groups, slabs, reach, registry, backend, quantisation, progress,
            tuple(adapters),
        )  # fmt: skip
        loaded = load_modules(plan, config) if isinstance(config, ModuleConfig) else _load_llama(plan, config)
        names = frozenset(each.name for each in adapters)
        limits = [
            StepLimits(config.vocabulary_size, config.context_tokens, group.page_tokens, slab.memory.units, group.window, names)
            for group, slab in zip(layout.groups, slabs, strict=True)
        ]
        return cls(loaded.decoder, layout, slabs, limits, loaded.backend, cores, [each.adapter for each in adapters])

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        drafts_apart = batch.draft_tokens > 0 and not self.decoder.chunks_read_as_rows
        steps = build_steps(batch.singly() if drafts_apart else batch, self._limits)
        try:
            with torch.inference_mode(), self._loan() as loan:
                logits = self.decoder.forward(steps, marks if self._on_host else None, loan).to("cpu")
        except (RuntimeError, MemoryError) as error:
            self._failed_steps += 1
            raise ModelError(f"a step of {batch.scheduled_sequences} sequences failed: {error}") from error
        self._steps += 1
        self._lent_steps += loan.lent
        self._recalled_steps += loan.recalled
        self._rows += batch.scheduled_tokens
        return logits

    def rest(self) -> None:
        self._cores.rest()

    def _loan(self) -> contextlib.AbstractContextManager[Loan]:
        if self.decoder.uses_loans:
            return self._cores.borrowed()
        self._cores.working()
        return contextlib.nullcontext(NO_LOAN)

    def statistics(self) -> RunnerStatistics:
        seconds = self.decoder.part_seconds()
        return RunnerStatistics(self._steps, self._rows, self._failed_steps, seconds, self._lent_steps, self._recalled_steps)


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


def _load_llama(plan: LoadPlan, config: ModelConfig) -> Loaded:
    """The decoder of an architecture that is ours."""
    setups = [
        replace(group_setup(config, group, slab, plan.reach, plan.device), quantisation=plan.quantisation)
        for group, slab in zip(plan.groups, plan.slabs, strict=True)
    ]
    chosen = choose_backends(plan.registry, plan.backend, setups)
    with torch.inference_mode():
        weights = WeightLoader(_source(plan.ref, config), config, chosen[0], plan.device, plan.dtype).load(plan.progress)
        if plan.adapters:
            weights = replace(weights, adapters=load_adapters(plan.adapters, config, chosen[0], plan.device))
    return Loaded(Decoder(weights, chosen, layer_places(plan.groups)), chosen[0].name)


def _reach(context_tokens: int, groups: Sequence[KvGroup], slabs: Sequence[Slab]) -> int:
    """Positions that a sequence can reach: pages of a group without a window bound them, those of the others come back."""
    held = [
        (slab.memory.units - 1) * group.layout.page_tokens
        for group, slab in zip(groups, slabs, strict=True)
        if group.layout.window is None
    ]
    return min([context_tokens, *held])


def _source(ref: ModelRef, config: ModelConfig) -> WeightSource:
    return GgufSource(ref.path, config) if ref.format == "gguf" else SafetensorsSource(ref.path)

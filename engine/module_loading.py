"""Loading a model as transformers' modules: what must hold of them, and the attention that takes the place of theirs.

The library is imported here and only where such a model is loaded: it is an extra of this package.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.backend import BackendUnfit, Setup
from engine.backend_check import choose_backends
from engine.load_plan import Loaded, LoadPlan
from engine.module_attention import LayerView, ModuleAttention, ModuleUnfit, register
from engine.module_check import LEAST_PAGES, WholePrompt, check_modules, plain_logits, probes
from engine.module_decoder import KeptShape, ModuleDecoder, PagedKeeper, Reach, run_modules
from engine.module_products import pack_products, watch
from engine.quantisation import WeightQuantisation
from engine.scored_attention import ScoredAttention
from engine.step import StepLimits
from engine.weights import LoadProgress, WeightsError
from models.module_config import ModuleConfig
from text.errors import UnsupportedModel

#: The extra of this package that has the library.
EXTRA = "transformers"
MAX_NAMED_TENSORS = 3
# Of norms in a backend, which modules do not use.
_RMS_EPS = 1e-6
# What code that meets a model it was not made for raises.
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    AssertionError,
    OSError,
)


@dataclass(slots=True)
class _Looker:
    """Implements Keeper for a first look: what each layer asks for. Its attention is the values' mean, of no use to anyone."""

    shape: KeptShape
    views: list[LayerView] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        view: LayerView,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Keeper."""
        if layer != len(self.views):
            raise ModuleUnfit(f"layer {layer} of its attention came after {len(self.views)} others")
        self.shape.check(layer, query, key, value)
        self.views.append(view)
        return value.mean(dim=1, keepdim=True).expand(-1, query.shape[1], -1).contiguous()


def load_modules(plan: LoadPlan, config: ModuleConfig) -> Loaded:
    """The decoder of a model whose architecture is transformers' alone, compared with the modules by themselves.

    Raises UnsupportedModel naming the architecture and the reason, BackendUnfit, and ValueError for too few pages.
    """
    (slab,), (group,) = plan.slabs, plan.groups
    if slab.memory.units < LEAST_PAGES:
        raise ValueError(
            f"total_pages is {slab.memory.units}; modules of transformers are tried on pages: the least is {LEAST_PAGES}"
        )
    if plan.adapters:
        raise UnsupportedModel(
            f"adapters has {plan.adapters[0].name!r}; modules of transformers, which compute {config.architecture}, take none"
        )
    if plan.quantisation is not WeightQuantisation.OFF:
        raise UnsupportedModel(
            f"weight_quantisation is {plan.quantisation.value!r}; {config.architecture} is computed by transformers' modules, "
            f"whose weights stay in their dtype: choose {WeightQuantisation.OFF.value!r}"
        )
    library, report = _library(config), plan.progress or _silent
    report(LoadProgress(0, 1))
    limits = StepLimits(config.vocabulary_size, config.context_tokens, group.layout.page_tokens, slab.memory.units)
    try:
        with torch.inference_mode():
            loaded = _decoder(library, plan, config, limits)
    except (BackendUnfit, WeightsError, UnsupportedModel):
        raise
    except _FAILURES as error:
        raise _refusal(config, error) from error
    report(LoadProgress(1, 1))
    return loaded


def _decoder(library: Any, plan: LoadPlan, config: ModuleConfig, limits: StepLimits) -> Loaded:
    model = _model(library, plan, config)
    expected = [plain_logits(model, ids, plan.device) for ids in probes(limits)]
    if expected[0].shape[1] != config.vocabulary_size:
        raise ModuleUnfit(f"it gives {expected[0].shape[1]} logits; vocab_size in its config.json is {config.vocabulary_size}")
    shape = KeptShape(config.layers, config.heads, config.kv_heads, config.head_dim, plan.dtype)
    looker = _Looker(shape)
    attention = ModuleAttention(looker)
    _take_over(model, register(library, attention))
    watch(model)
    _look(model, looker, plan.device)
    setups = _setups(plan, shape, looker.views)
    backends = choose_backends(plan.registry, plan.backend, tuple(setups.values()))
    pack_products(model, model.get_output_embeddings(), backends[0], plan.dtype)
    pool = next(iter(setups.values())).pool
    keeper = PagedKeeper(shape, dict(zip(setups, backends, strict=True)), ScoredAttention(pool))
    decoder = ModuleDecoder(model, attention, keeper, plan.device)
    check_modules(decoder, limits, expected, plan.dtype)
    pool.zero_()
    return Loaded(decoder, backends[0].name)


def _refusal(config: ModuleConfig, error: Exception) -> UnsupportedModel:
    reason = str(error) if isinstance(error, ModuleUnfit) else f"its modules failed ({type(error).__name__}): {error}"
    return UnsupportedModel(f"{config.architecture} cannot be served: {reason}.")


def _silent(_: LoadProgress) -> None:
    return None


def _library(config: ModuleConfig) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedModel(
            f"{config.architecture} is an architecture that only transformers computes, which is not installed here; "
            f"run: pip install 'tandem-serving[{EXTRA}]'"
        ) from error
    return transformers


def _model(library: Any, plan: LoadPlan, config: ModuleConfig) -> Any:
    """The model with attention of its own. Raises ModuleUnfit, and WeightsError when the files do not fit it."""
    where = {"local_files_only": True, "trust_remote_code": False}
    if config.architecture not in library.CONFIG_MAPPING:
        raise ModuleUnfit(
            f"transformers {library.__version__} has no code for it, and code that comes with a model's files is not run"
        )
    settings = library.AutoConfig.from_pretrained(plan.ref.path, **where)
    if type(settings) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModuleUnfit("transformers has no decoder for text of it")
    _check_class(library.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)])
    library.utils.logging.disable_progress_bar()
    model, told = library.AutoModelForCausalLM.from_pretrained(
        plan.ref.path,
        config=settings,
        dtype=plan.dtype,
        attn_implementation="eager",
        use_safetensors=True,
        output_loading_info=True,
        # They are refused below, by name.
        ignore_mismatched_sizes=True,
        **where,
    )
    _check_tensors(config, told)
    return model.eval().to(plan.device)


def _check_class(model_class: type) -> None:
    if getattr(model_class, "_is_stateful", False):
        raise ModuleUnfit("it keeps a state beside keys and values, and only attention over pages is served")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:  # type: ignore[attr-defined]
        raise ModuleUnfit("it computes the logits of all rows of a step, where only the wanted ones may reach the head")


def _check_tensors(config: ModuleConfig, told: dict[str, Any]) -> None:
    """Raises WeightsError where the files lack a tensor, or have one that nothing reads or that has another shape."""
    for key, wrong in (
        ("missing_keys", "are missing"),
        ("mismatched_keys", "have another shape than the configuration says"),
        ("unexpected_keys", f"have no place in a {config.architecture} decoder"),
    ):
        names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in told.get(key, ()))
        if names:
            raise WeightsError(f"{len(names)} tensors {wrong}, among them {', '.join(names[:MAX_NAMED_TENSORS])}")


def _take_over(model: Any, name: str) -> None:
    """Our functions, known under that name, in the place of the model's attention. Raises ModuleUnfit where it has none that can
    be replaced."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ModuleUnfit("its attention does not come through transformers' interface for it")


def _look(model: Any, looker: _Looker, device: torch.device) -> None:
    """Find out what each layer asks of its attention, by running two tokens."""
    run_modules(model, WholePrompt(np.zeros(2, dtype=np.int64)), device)
    if len(looker.views) != looker.shape.layers:
        raise ModuleUnfit(
            f"{len(looker.views)} of its {looker.shape.layers} layers have attention that comes through transformers' interface "
            "for it"
        )


def _setups(plan: LoadPlan, shape: KeptShape, views: list[LayerView]) -> dict[Reach, Setup]:
    """What backends are built for, over the one pool: one for each way of looking back."""
    layout, memory = plan.groups[0].layout, plan.slabs[0].memory
    pool = plan.slabs[0].data.view(plan.dtype).view(memory.units, layout.layers, layout.page_tokens, 2, shape.kv_heads, -1)
    # Cosines of one and sines of zero: keys and queries come with their positions in them.
    still = torch.cat([torch.ones(shape.head_dim // 2), torch.zeros(shape.head_dim // 2)])
    rope = still.expand(plan.reach, -1).contiguous().to(plan.device)
    return {
        (view.window, view.scale): Setup(
            device=plan.device,
            dtype=plan.dtype,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_eps=_RMS_EPS,
            pool=pool,
            rope=rope,
            window=view.window,
            score_scale=view.scale,
        )
        for view in views
    }

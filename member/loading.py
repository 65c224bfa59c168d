"""The model that a member's settings ask for."""

from functools import partial
from pathlib import Path

from engine.adapters import AdapterLimits, open_adapters, parse_adapters
from engine.core_share import Cores, CoreShare, OwnCores
from engine.layout import GroupLayout
from engine.pages import MAX_PAGES
from engine.runner import ModelRunner
from member.config import MemberSettings
from models import ModelRef


def load_runner(settings: MemberSettings, ref: ModelRef, name: str) -> ModelRunner:
    """Weights, KV memory and backend, as `ModelRunner.load` says; takes seconds, so not on the event loop.

    name: the member's. Raises ValueError, too, when the folder of `core_share` can not be used, and AdapterError.
    """
    limits = AdapterLimits(settings.adapter_max_rank, settings.adapter_max_bytes)
    adapters = open_adapters(parse_adapters(settings.adapters), limits)
    return ModelRunner.load(
        ref,
        dtype=settings.dtype,
        weight_quantisation=settings.weight_quantisation,
        page_tokens=settings.page_tokens,
        total_pages=settings.total_pages,
        window_pages=partial(window_pages, settings),
        threads=settings.engine_threads,
        backend=settings.backend,
        cores=_cores(settings, name),
        adapters=adapters,
    )


def _cores(settings: MemberSettings, name: str) -> Cores:
    if not settings.core_share:
        return OwnCores()
    try:
        return CoreShare(Path(settings.core_share), name, settings.engine_threads)
    except OSError as error:
        raise ValueError(f"core_share is {settings.core_share}: {error}") from error


def window_pages(settings: MemberSettings, group: GroupLayout) -> int:
    """Pages of a group behind a window, the null page included: more than all sequences hold at once would never be used."""
    if settings.window_pages:
        return settings.window_pages
    at_once = group.most_pages(group.page_tokens * MAX_PAGES, settings.max_step_tokens)
    return min(settings.total_pages, 1 + settings.max_sequences * at_once)

"""The model that a member's settings ask for."""

from engine.runner import ModelRunner
from member.config import MemberSettings
from models import ModelRef


def load_runner(settings: MemberSettings, ref: ModelRef) -> ModelRunner:
    """Weights, KV memory and backend, as `ModelRunner.load` says; takes seconds, so not on the event loop."""
    return ModelRunner.load(
        ref,
        dtype=settings.dtype,
        page_tokens=settings.page_tokens,
        total_pages=settings.total_pages,
        threads=settings.engine_threads,
        backend=settings.backend,
    )

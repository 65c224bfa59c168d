"""What a decode member says of itself, and what it copies pages with."""

from collections.abc import Callable, Sequence

from decode_svc.admission import Identity
from decode_svc.config import DecodeSettings
from decode_svc.memory import DecodeMemory
from engine.page_copy import PageCopy
from engine.runner import Runner
from engine.swap import SwapArea
from member.prefix_gauges import identity_of
from member.watch import MemberInfo, MemberRole


def describe(model: str, me: Identity, runner: Runner, settings: DecodeSettings, memory: DecodeMemory) -> MemberInfo:
    """What routers are told once."""
    return MemberInfo(
        member=me.member,
        incarnation=me.incarnation,
        address=me.address,
        role=MemberRole.DECODE,
        model=model,
        model_snapshot=me.model_snapshot,
        layout_fingerprint=runner.layout.fingerprint,
        page_tokens=memory.page_tokens[memory.measure],
        total_pages=memory.available(),
        context_tokens=me.context_tokens,
        vocabulary_size=me.vocabulary_size,
        max_sequences=settings.max_sequences,
        computes_prompts=me.computes_prompts,
        sequence_pages=memory.sequence_pages,
        adapters=me.adapters,
        prefix_identity=identity_of(runner.layout.prefix_keys if settings.prefix_cache else None),
    )


def copier(runner: Runner, host_pages: int) -> Callable[[Sequence[PageCopy]], None]:
    """What runs copies between pages and host pages."""
    if host_pages:
        return SwapArea(runner.layout, runner.slab_data, host_pages).run

    def none(copies: Sequence[PageCopy]) -> None:
        raise AssertionError(f"{len(copies)} copies are to be run and there is no host area")

    return none

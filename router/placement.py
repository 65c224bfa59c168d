"""Which members serve an attempt: predicted first-token time and free pages, without herding. Pure.

In each pool two members that have room are drawn at random and the cheaper one is taken. Routers that all see the same
snapshot therefore do not all run to the same member, and what this router has sent since the snapshot is added to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

#: Assumed prompt speed of a member that has not measured its own yet, in tokens per second.
UNMEASURED_TOKENS_PER_S = 2000.0
#: Assumed time of a decode step of a member that has not measured its own yet, in seconds.
UNMEASURED_STEP_S = 0.02
#: What the last free page of a decode member is held to cost, in seconds of first-token time; half full costs a quarter of it.
PAGE_PRESSURE_S = 1.0

T = TypeVar("T")


class Dice(Protocol):
    """Where chance comes from: `random.Random`, seeded where a run is to be repeated."""

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        """`k` different members of the population, in the order drawn."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The members of one attempt. `prefill_member` is empty when the decode member computes the prompt itself."""

    decode_member: str
    prefill_member: str = ""


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode member as its last snapshot showed it, and what this router has sent there since (`inflight_*`)."""

    member: str
    total_pages: int
    free_pages: int
    max_sequences: int
    running_sequences: int = 0
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    computes_prompts: bool = False
    draining: bool = False
    stale: bool = False
    inflight_pages: int = 0
    inflight_sequences: int = 0
    inflight_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill member as its last snapshot showed it, and the prompt tokens this router has sent there since."""

    member: str
    max_queued_tokens: int
    waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    draining: bool = False
    stale: bool = False
    inflight_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What an attempt needs, and the members that it must not be given to (they refused it or were lost)."""

    prompt_tokens: int
    pages: int
    excluded: frozenset[str] = field(default_factory=frozenset)


class Refusal(Enum):
    """Why a member was not taken."""

    EXCLUDED = "excluded"
    DRAINING = "draining"
    NO_PAGES = "no_pages"
    NO_SEQUENCE = "no_sequence"
    NO_TOKENS = "no_tokens"
    NO_PREFILL = "no_prefill"
    """The decode member has room, but it does not compute prompts and no prefill member can be had."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement and its predicted seconds to the first token, or None; and why members were refused, by member."""

    placement: Placement | None
    first_token_s: float
    refusals: dict[str, Refusal]


@dataclass(frozen=True, slots=True)
class _Candidate:
    member: str
    stale: bool
    first_token_s: float
    cost_s: float


def choose(need: Need, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rng: Dice) -> Choice:
    """Pick a decode member and a prefill member, of each pool the cheaper of two that `rng` draws among those with room.

    Members with a stale snapshot are drawn only when there is no other. A decode member that computes prompts needs no
    prefill member and gets none when the cell has none to use (none there, draining, excluded). Where prefill members are
    merely full the request waits for them: computing long prompts beside running sequences would slow all of those.
    """
    refusals: dict[str, Refusal] = {}
    sources: list[_Candidate] = []
    for source_view in prefill:
        reason = _prefill_refusal(need, source_view)
        if reason is None:
            sources.append(_prefill_candidate(need, source_view))
        else:
            refusals[source_view.member] = reason
    handed_over = bool(sources)
    busy = any(reason is Refusal.NO_TOKENS for reason in refusals.values())
    targets: list[_Candidate] = []
    for target_view in decode:
        reason = _decode_refusal(need, target_view)
        if reason is None and not handed_over and (busy or not target_view.computes_prompts):
            reason = Refusal.NO_PREFILL
        if reason is None:
            targets.append(_decode_candidate(need, target_view, handed_over))
        else:
            refusals[target_view.member] = reason
    target = _draw(targets, rng)
    if target is None:
        return Choice(None, 0.0, refusals)
    source = _draw(sources, rng)
    if source is None:
        return Choice(Placement(target.member), target.first_token_s, refusals)
    return Choice(Placement(target.member, source.member), source.first_token_s + target.first_token_s, refusals)


def _prefill_refusal(need: Need, view: PrefillView) -> Refusal | None:
    if view.member in need.excluded:
        return Refusal.EXCLUDED
    if view.draining:
        return Refusal.DRAINING
    if view.waiting_tokens + view.inflight_tokens + need.prompt_tokens > view.max_queued_tokens:
        return Refusal.NO_TOKENS
    return None


def _decode_refusal(need: Need, view: DecodeView) -> Refusal | None:
    if view.member in need.excluded:
        return Refusal.EXCLUDED
    if view.draining:
        return Refusal.DRAINING
    if _sequences(view) >= view.max_sequences:
        return Refusal.NO_SEQUENCE
    if need.pages > view.free_pages - view.inflight_pages:
        return Refusal.NO_PAGES
    return None


def _sequences(view: DecodeView) -> int:
    return view.running_sequences + view.waiting_sequences + view.inflight_sequences


def _prompt_seconds(need: Need, view: DecodeView | PrefillView) -> float:
    """Time until a prompt that joins the member's queue now is computed."""
    speed = view.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
    return (view.waiting_tokens + view.inflight_tokens + need.prompt_tokens) / speed


def _prefill_candidate(need: Need, view: PrefillView) -> _Candidate:
    seconds = _prompt_seconds(need, view)
    return _Candidate(view.member, view.stale, seconds, seconds)


def _decode_candidate(need: Need, view: DecodeView, handed_over: bool) -> _Candidate:
    """A step that runs when the pages arrive has to end first, then one step gives the first token. A step of more
    sequences takes longer, so sequences that the measured step did not have yet are added in proportion."""
    step_s = view.decode_step_s or UNMEASURED_STEP_S
    measured = max(1, view.running_sequences)
    seconds = step_s * (1.0 + _sequences(view) / measured)
    if not handed_over:
        seconds += _prompt_seconds(need, view)
    used = 1.0 - (view.free_pages - view.inflight_pages - need.pages) / max(1, view.total_pages)
    return _Candidate(view.member, view.stale, seconds, seconds + PAGE_PRESSURE_S * used * used)


def _draw(candidates: Sequence[_Candidate], rng: Dice) -> _Candidate | None:
    """The cheaper of two drawn ones; equal costs go to the first drawn, so ties spread."""
    fresh = [candidate for candidate in candidates if not candidate.stale] or list(candidates)
    if not fresh:
        return None
    drawn = rng.sample(fresh, k=min(2, len(fresh)))
    return min(drawn, key=lambda candidate: candidate.cost_s)

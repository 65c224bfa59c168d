"""Which members serve an attempt: predicted first-token time and free pages, without herding. Pure.

In each pool a few members that have room are drawn at random and the cheapest is taken. Routers that all see the same
snapshot therefore do not all run to the same member, and what this router has sent since the snapshot is added to it.

Members are asked for room in the order in which they are drawn, so that a large pool that is not full costs no more than a
small one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

from lifecycle.adapters import Adapter
from router.nearness import FAR, Near, Nearness

#: Assumed prompt speed of a member that has not measured its own yet, in tokens per second.
UNMEASURED_TOKENS_PER_S = 2000.0
#: Assumed time of a decode step of a member that has not measured its own yet, in seconds.
UNMEASURED_STEP_S = 0.02
#: What the last free page of a decode member is held to cost, in seconds of first-token time; half full costs a quarter of it.
PAGE_PRESSURE_S = 1.0

#: What a hand-over brings, in tokens per second, as far as members that lack less of a prompt are to be preferred by it.
HANDED_OVER_TOKENS_PER_S = 40_000.0
#: Members that are thought to have most of a prompt and are compared beside those that were drawn.
NEAR_COMPARED = 2
#: Members with room that are compared; the cheapest is taken. Chosen by simulation (docs/simulation.md).
COMPARED = 4
#: Members that are drawn before the whole pool is put into an order.
FIRST_DRAWN = 8

T = TypeVar("T")
V = TypeVar("V", "DecodeView", "PrefillView")


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
    adapters: tuple[Adapter, ...] = ()
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
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """When a decode member that has most of a prompt computes the rest itself: at most so many tokens, predicted to be done in at
    most so many seconds. 0 tokens: never."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """What an attempt needs, and the members that it must not be given to (they refused it or were lost)."""

    prompt_tokens: int
    pages: int
    excluded: frozenset[str] = field(default_factory=frozenset)
    #: The KV comes from another decode member: nobody computes a prompt.
    moved: bool = False
    #: The decode member computes the prompt, whoever else could.
    alone: bool = False
    near: Near = FAR
    local: LocalLimits = field(default_factory=LocalLimits)
    #: Outputs of the prompt, each a sequence of the decode member.
    outputs: int = 1
    #: What computes it; None: the base model, which every member has.
    adapter: Adapter | None = None


class Refusal(Enum):
    """Why a member was not taken."""

    EXCLUDED = "excluded"
    DRAINING = "draining"
    NO_ADAPTER = "no_adapter"
    NO_PAGES = "no_pages"
    NO_SEQUENCE = "no_sequence"
    NO_TOKENS = "no_tokens"
    NO_PREFILL = "no_prefill"
    """The decode member has room, but it does not compute prompts and no prefill member can be had."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement and its predicted seconds to the first token; or None, and why each member was refused.

    Beside a placement `refusals` has only those members that were drawn before enough were found. `computed_tokens`: what the
    decode member is thought to lack of the prompt, where it computes that itself instead of a prefill member.
    """

    placement: Placement | None
    first_token_s: float
    refusals: dict[str, Refusal]
    computed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    member: str
    first_token_s: float
    cost_s: float


def choose(
    need: Need, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rng: Dice, compared: int = COMPARED
) -> Choice:
    """Pick a decode member and a prefill member, of each pool the cheapest of `compared` that `rng` draws with room.

    Members with a stale snapshot are drawn only when there is no other. A decode member that computes prompts needs no
    prefill member and gets none when the cell has none to use (none there, draining, excluded, without the adapter). Where
    prefill members are merely full the request waits for them: computing long prompts beside running sequences would slow all
    of those.

    Members that are thought to have most of the prompt are compared with those that were drawn. A decode member that lacks little
    of it computes that itself, as far as `need.local` goes.
    """
    refusals: dict[str, Refusal] = {}
    local = _local(need, decode, rng)
    if local is not None:
        return local
    sources: list[_Candidate] = []
    if not (need.moved or need.alone):
        refused = partial(prefill_refusal, need)
        drawn = _some(prefill, refused, refusals, rng, compared)
        sources = [_prefill_candidate(need, view) for view in _with_near(drawn, prefill, need.near.prefill, refused, rng)]
    handed_over = need.moved or bool(sources)
    alone = handed_over or not any(reason is Refusal.NO_TOKENS for reason in refusals.values())

    def no_seat(view: DecodeView) -> Refusal | None:
        reason = decode_refusal(need, view)
        if reason is None and not handed_over and not (alone and view.computes_prompts):
            return Refusal.NO_PREFILL
        return reason

    chosen = _with_near(_some(decode, no_seat, refusals, rng, compared), decode, need.near.decode, no_seat, rng)
    targets = [_decode_candidate(need, view, handed_over) for view in chosen]
    if not targets:
        return Choice(None, 0.0, refusals)
    target = min(targets, key=_cost)
    if not sources:
        return Choice(Placement(target.member), target.first_token_s, refusals)
    source = min(sources, key=_cost)
    return Choice(Placement(target.member, source.member), source.first_token_s + target.first_token_s, refusals)


def _local(need: Need, decode: Sequence[DecodeView], rng: Dice) -> Choice | None:
    """The decode member that has most of the prompt and the least to do, when computing the rest there is a small matter."""
    if not need.local.tokens:
        return None
    best: tuple[_Candidate, int] | None = None
    for place in _few(need.near.decode.places, rng):
        view = decode[place]
        lacking = _lacking(need, need.near.decode, view.member)
        if not view.computes_prompts or view.stale or decode_refusal(need, view) is not None:
            continue
        if lacking > need.local.tokens or _prompt_seconds(lacking, view) > need.local.seconds:
            continue
        candidate = _decode_candidate(need, view, handed_over=False)
        if best is None or candidate.cost_s < best[0].cost_s:
            best = (candidate, lacking)
    if best is None:
        return None
    return Choice(Placement(best[0].member), best[0].first_token_s, {}, best[1])


def _with_near(drawn: list[V], views: Sequence[V], near: Nearness, refusal: Callable[[V], Refusal | None], rng: Dice) -> list[V]:
    """Those that were drawn, and a few that are thought to have most of the prompt."""
    for place in _few(near.places, rng):
        view = views[place]
        if not view.stale and refusal(view) is None and all(view is not other for other in drawn):
            drawn.append(view)
    return drawn


def _few(places: Sequence[int], rng: Dice) -> Sequence[int]:
    return places if len(places) <= NEAR_COMPARED else rng.sample(places, NEAR_COMPARED)


def _lacking(need: Need, near: Nearness, member: str) -> int:
    """Tokens of the prompt that a member is thought to have to compute: at least the last one, for its logits."""
    return max(min(1, need.prompt_tokens), need.prompt_tokens - near.tokens(member))


def _some(
    views: Sequence[V],
    refusal: Callable[[V], Refusal | None],
    refusals: dict[str, Refusal],
    rng: Dice,
    compared: int,
) -> list[V]:
    """The first of the drawn members that have room, those with fresh news before all others; at most `compared`.

    The cheapest is taken and equal costs go to the first drawn, so ties spread.
    """
    fresh: list[V] = []
    old: list[V] = []
    for place in _drawn(len(views), rng):
        view = views[place]
        reason = refusal(view)
        if reason is not None:
            refusals[view.member] = reason
            continue
        (old if view.stale else fresh).append(view)
        if len(fresh) == compared:
            break
    return fresh or old[:compared]


def _drawn(count: int, rng: Dice) -> Iterator[int]:
    """The numbers below `count` in random order; only the first few are drawn when no more are wanted."""
    first = rng.sample(range(count), k=min(FIRST_DRAWN, count))
    yield from first
    if len(first) < count:
        seen = set(first)
        yield from (place for place in rng.sample(range(count), k=count) if place not in seen)


def prefill_refusal(need: Need, view: PrefillView) -> Refusal | None:
    """Why a prefill member can not take an attempt; None when it can."""
    if view.member in need.excluded:
        return Refusal.EXCLUDED
    if view.draining:
        return Refusal.DRAINING
    if need.adapter is not None and need.adapter not in view.adapters:
        return Refusal.NO_ADAPTER
    # One with nothing to do takes any prompt: with what an earlier attempt chose it may be longer than those that are let in.
    queued = view.waiting_tokens + view.inflight_tokens
    if queued and queued + need.prompt_tokens > view.max_queued_tokens:
        return Refusal.NO_TOKENS
    return None


def decode_refusal(need: Need, view: DecodeView) -> Refusal | None:
    """Why a decode member has no room for an attempt; None when it has."""
    if view.member in need.excluded:
        return Refusal.EXCLUDED
    if view.draining:
        return Refusal.DRAINING
    if need.adapter is not None and need.adapter not in view.adapters:
        return Refusal.NO_ADAPTER
    if _sequences(view) + need.outputs > view.max_sequences:
        return Refusal.NO_SEQUENCE
    if need.pages > view.free_pages - view.inflight_pages:
        return Refusal.NO_PAGES
    return None


def _sequences(view: DecodeView) -> int:
    return view.running_sequences + view.waiting_sequences + view.inflight_sequences


def _prompt_seconds(tokens: int, view: DecodeView | PrefillView) -> float:
    """Time until so many tokens that join the member's queue now are computed."""
    speed = view.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
    return (view.waiting_tokens + view.inflight_tokens + tokens) / speed


def _prefill_candidate(need: Need, view: PrefillView) -> _Candidate:
    seconds = _prompt_seconds(_lacking(need, need.near.prefill, view.member), view)
    return _Candidate(view.member, seconds, seconds)


def _decode_candidate(need: Need, view: DecodeView, handed_over: bool) -> _Candidate:
    """A step that runs when the pages arrive has to end first, then one step gives the first token. A step of more
    sequences takes longer, so sequences that the measured step did not have yet are added in proportion."""
    step_s = view.decode_step_s or UNMEASURED_STEP_S
    measured = max(1, view.running_sequences)
    seconds = step_s * (1.0 + _sequences(view) / measured)
    lacking = _lacking(need, need.near.decode, view.member)
    if not handed_over:
        seconds += _prompt_seconds(lacking, view)
    used = 1.0 - (view.free_pages - view.inflight_pages - need.pages) / max(1, view.total_pages)
    sent_s = lacking / HANDED_OVER_TOKENS_PER_S if handed_over else 0.0
    return _Candidate(view.member, seconds, seconds + PAGE_PRESSURE_S * used * used + sent_s)


def _cost(candidate: _Candidate) -> float:
    return candidate.cost_s

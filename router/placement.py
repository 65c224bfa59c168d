"""Which members serve an attempt: predicted first-token time and free pages, without herding. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


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
    """The decode member would do, but it does not compute prompts and no prefill member can be had."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision: a placement and its predicted seconds to the first token, or None and why each member was refused."""

    placement: Placement | None
    first_token_s: float
    refusals: dict[str, Refusal]


def choose(need: Need, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rng: random.Random) -> Choice:
    """Pick the better of two members drawn by `rng` from those that have room, in each pool; fresh snapshots before stale ones."""
    raise NotImplementedError

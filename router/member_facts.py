"""What a router knows of a member: what it is and how busy it said it was. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from lifecycle.adapters import Adapter
from lifecycle.pages_by_state import NO_PAGES, PagesByState


class Role(Enum):
    """Which pool."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member is; fixed for an incarnation. `total_pages` are those that can be given out.

    sequence_pages: most pages that one sequence holds at once, however long it is; 0: as many as its tokens need.
    """

    name: str
    incarnation: str
    address: str
    role: Role | None
    model_snapshot: str
    page_tokens: int
    total_pages: int
    context_tokens: int
    max_sequences: int
    max_queued_tokens: int
    computes_prompts: bool
    sequence_pages: int = 0
    prefix_identity: bytes = b""
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """How busy a member was at its last news. `steps` and `tokens` (prompt tokens computed, or tokens chosen) since its start."""

    free_pages: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    quarantined_pages: int = 0
    draining: bool = False
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    expected_output_tokens: int = 0
    preempted_sequences: int = 0
    paused_sequences: int = 0
    steps: int = 0
    tokens: int = 0
    pages: PagesByState = NO_PAGES


class KnownMember(Protocol):
    """A member as placement sees it. Compared by identity; `load` is another object after each news, told at `seen_at`."""

    info: MemberInfo
    load: MemberLoad
    seen_at: float


M = TypeVar("M", bound=KnownMember)


def largest(members: Sequence[M]) -> M:
    """The member with the most KV; its page size is the one that requests are measured with."""
    return max(members, key=lambda member: member.info.total_pages * member.info.page_tokens)

"""What is known of drafts from one source: how each sequence's did, and what they cost to make. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.drafts import DraftSource
from decode_svc.seats import Seat

#: Weight that an earlier draft keeps for each later one of its sequence.
KEPT = 0.85
#: A sequence whose drafts are right less often does not draft, however cheap rows are.
ACCEPTED_LEAST = 0.05
#: A sequence that does not draft tries again after so many tokens, twice as many each time, up to the second number.
REST_TOKENS, REST_TOKENS_MOST = 32, 512
#: What the longest drafts are taken to be right with at most, so that one miss is never the end of drafting.
ACCEPTED_MOST = 0.99
#: Weight that the time and the drafts of a step keep for each later step.
STEP_KEPT = 0.98
#: Time is spread over so many drafts at least: a prompt is read once, before the first of them.
SPREAD_TOKENS = 64.0


class DraftOrigin(Enum):
    """Where a draft came from."""

    GRAMMAR = "grammar"
    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start: drafts that were computed, and those that were what was chosen."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Record:
    """How a sequence's drafts did. right, wrong: fading counts; tried_at: tokens it had when it drafted last, or began anew."""

    seat: Seat
    right: float = 0.0
    wrong: float = 0.0
    tried_at: int = 0
    rest_tokens: int = REST_TOKENS
    off: bool = False

    @property
    def accepted(self) -> float:
        """Probability that its next draft is right; one half while nothing is known."""
        return min(ACCEPTED_MOST, (self.right + 0.25) / (self.right + self.wrong + 0.5))

    def note(self, right: int, *, wrong: bool) -> None:
        """So many of its drafts were right before one was wrong, if one was."""
        self.right = KEPT * self.right + right
        self.wrong = KEPT * self.wrong + wrong
        self.tried_at = self.seat.sequence.selected_tokens
        if right:
            self.rest_tokens = REST_TOKENS

    def worth(self, least: float, most: int) -> int:
        """How many drafts are worth their rows: the last one of k is right with accepted ** k, which must be above `least`."""
        least = max(least, ACCEPTED_LEAST)
        self.off = self.accepted <= least
        if self.off:
            return self._try_again(most)
        return min(most, math.floor(math.log(least) / math.log(self.accepted))) if least < 1.0 else 0

    def _try_again(self, most: int) -> int:
        chosen = self.seat.sequence.selected_tokens
        if chosen - self.tried_at < self.rest_tokens:
            return 0
        if self.accepted < 0.5:
            self.right = self.wrong = 0.0
        self.tried_at = chosen
        self.rest_tokens = min(2 * self.rest_tokens, REST_TOKENS_MOST)
        return 0


class DraftCost:
    """What a draft costs to be made, learned from the steps that ran. What nobody renews fades, so that it is tried again."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Before a step so many drafts took so long, texts that had to be read first included."""
        self._seconds = STEP_KEPT * self._seconds + seconds
        self._tokens = STEP_KEPT * self._tokens + tokens

    @property
    def token_s(self) -> float:
        """Seconds for one draft; 0 while nothing is known."""
        return self._seconds / max(self._tokens, SPREAD_TOKENS)


@dataclass(slots=True)
class Origin:
    """A source at work. asked: whether it was, before the step that runs; drafted_tokens: what it gave then."""

    kind: DraftOrigin
    source: DraftSource
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    cost: DraftCost = field(default_factory=DraftCost)
    records: dict[int, Record] = field(default_factory=dict)
    asked: bool = False
    drafted_tokens: int = 0

    def record(self, seat: Seat) -> Record:
        """That of a seat; a new one where there is none."""
        found = self.records.get(seat.number)
        if found is None:
            found = self.records[seat.number] = Record(seat, tried_at=seat.sequence.selected_tokens)
        return found

    def drafting(self) -> set[int]:
        """Seats whose drafts from here are worth something."""
        return {number for number, record in self.records.items() if not record.off}

    def forget(self, seat: int) -> None:
        """The seat has ended."""
        del self.records[seat]
        self.source.forget(seat)

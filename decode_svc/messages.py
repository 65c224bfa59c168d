"""What the engine thread of a decode member is told, and what it tells: values, no proto, no tensors. Pure.

Times are readings of the process's monotonic clock, in seconds. A seat is named by a number that the event loop gives
out and never uses twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from decode_svc.flow import SlowReader
from engine.log_probs import TokenLogProb
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from kv_transfer.grant_writer import PushesEnded, Transfers
from kv_transfer.offer import Endpoint, Grant, Peer
from kv_transfer.plan import HandoverPlan
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage

# To the engine


@dataclass(frozen=True, slots=True)
class Sibling:
    """One more output of a prompt: the number of its seat, and `sequence` and `begun` as in OpenSeat."""

    seat: int
    sequence: SequenceSpec
    begun: TokenSequence | None = None


@dataclass(frozen=True, slots=True)
class OpenSeat:
    """An Open that this member could serve. `prefill`: who will write the pages; None when the prompt is computed here.

    For an output that earlier attempts began: `begun` is its sequence, the engine's from now on, with their tokens replayed
    (None: it is made there), and `last_token_at` says when they chose the last one. `moved`: `prefill` is a decode member where
    the output stands still; the last token that it chose is not in the pages that it writes.

    salt: the tenant's, for the prefix cache; empty: the sequence has nothing to do with it. most_computed_tokens: bound for what
    is computed here of a prompt without `prefill`; None: no bound.

    siblings: further outputs of the same prompt, each with a seat of its own; this one has no more tokens of earlier attempts
    than any of them. None: it is the only output, and no choice is ever told of it.
    """

    seat: int
    sequence: SequenceSpec
    limits: Limits
    priority: int
    sends_output: bool
    prefill: Peer | None
    received_at: float
    begun: TokenSequence | None = None
    last_token_at: float | None = None
    moved: bool = False
    slow_reader: SlowReader = SlowReader.PAUSE
    salt: bytes = b""
    most_computed_tokens: int | None = None
    siblings: tuple[Sibling, ...] | None = None


@dataclass(frozen=True, slots=True)
class EndSeat:
    """End a seat at the next step border, and its siblings when it was opened with some. `requested_at`: when a cancel came; None
    when it is none, such as a clock."""

    seat: int
    ending: Ending
    requested_at: float | None


@dataclass(frozen=True, slots=True)
class EndChoice:
    """As EndSeat, for one seat of several siblings."""

    seat: int
    ending: Ending
    requested_at: float | None


@dataclass(frozen=True, slots=True)
class LosePrefill:
    """The hand-over will not be completed. `drained`: the prefill member said that it writes no more."""

    seat: int
    cause: Cause
    drained: bool


@dataclass(frozen=True, slots=True)
class PauseSeat:
    """Let a sequence stand still at the next step border, so that it can be moved."""

    seat: int


@dataclass(frozen=True, slots=True)
class PushSeat:
    """Write the KV of a sequence that stands still into a grant of another member."""

    seat: int
    plan: HandoverPlan


@dataclass(frozen=True, slots=True)
class DrainPush:
    """Another member wants a grant back that this one fills. `asker` names the waiting call."""

    grant_id: str
    asker: int


@dataclass(frozen=True, slots=True)
class OutputTaken:
    """Output of a seat was written to its stream, in bytes of its flow window."""

    seat: int
    amount_bytes: int


@dataclass(frozen=True, slots=True)
class EndpointMade:
    """Answer of the transfer thread: where one writer may write; None with a sentence when it can not be made."""

    writer: str
    endpoint: Endpoint | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NoticesArrived:
    """Notices of the transfer thread: (writer incarnation, notice)."""

    notices: tuple[tuple[str, bytes], ...]


class DrainAnswer(Enum):
    """What a prefill member said about a grant that is taken back."""

    STOPPED = "stopped"
    OTHER_INCARNATION = "other_incarnation"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class DrainAnswered:
    """The end of one try to drain a grant."""

    grant_id: str
    answer: DrainAnswer


@dataclass(frozen=True, slots=True)
class WriterFenced:
    """Answer of the transfer thread; `proven`: no write of this writer can land any more."""

    writer: str
    proven: bool


@dataclass(frozen=True, slots=True)
class StopAdmitting:
    """The member drains: every further Open is refused."""


@dataclass(frozen=True, slots=True)
class EndAll:
    """End every seat: the time to drain is over."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Examine:
    """Recount everything. `reply` gets the books and the faults, on the engine thread."""

    reply: Callable[[Mapping[str, int], Sequence[str]], None]


Command = (
    OpenSeat
    | EndSeat
    | EndChoice
    | LosePrefill
    | PauseSeat
    | PushSeat
    | PushesEnded
    | DrainPush
    | OutputTaken
    | EndpointMade
    | NoticesArrived
    | DrainAnswered
    | WriterFenced
    | StopAdmitting
    | EndAll
    | Examine
)

# From the engine to the stream of a seat


class SeatGranted(NamedTuple):
    """The seat is given; `grant` is None when the prompt is computed here."""

    seat: int
    grant: Grant | None
    cached_tokens: int


class SeatRefused(NamedTuple):
    """No seat. `reason` is a closed label of decode.proto, `detail` names the limit."""

    seat: int
    reason: str
    detail: str
    retryable: bool


class PromptReady(NamedTuple):
    """The prompt's KV is here and the first token is chosen. Seconds. received_bytes: of pages that were written here."""

    seat: int
    handover_s: float
    compute_s: float
    queue_s: float
    received_bytes: int = 0


class PromptScored(NamedTuple):
    """Log-probabilities of the next tokens of the prompt, in order; they begin with its second one."""

    seat: int
    log_probs: Sequence[TokenLogProb]


class OutputMade(NamedTuple):
    """What one step brought out: tokens chosen (none at an end from outside), safe text (whole characters), ids shown with it.

    log_probs: one for each token chosen, when the request wants them.
    """

    seat: int
    selected: Sequence[int]
    text: bytes
    shown: Sequence[int]
    log_probs: Sequence[TokenLogProb] = ()


class SeatPaused(NamedTuple):
    """The sequence stands still. `pushable`: its KV is in pages, for `cache_tokens` tokens, and can be written elsewhere."""

    seat: int
    cache_tokens: int
    pushable: bool


class SeatPushed(NamedTuple):
    """The end of a push. `cause`: a closed label, empty when every write is done; else nothing is in flight any more.

    detail: for people. handover_s: first write to last, in seconds.
    """

    seat: int
    cause: str
    detail: str
    sent_bytes: int
    handover_s: float


@dataclass(frozen=True, slots=True)
class SeatReport:
    """What is known about a seat at its end. Times are None for what did not happen; `released` counts by name.

    received_bytes: as in PromptReady.
    """

    opened_at: float
    granted_at: float | None
    begun_at: float | None
    ready_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float
    stop_hold_s: float
    held_bytes: int
    cancel_requested_at: float | None
    cancel_observed_at: float | None
    cancel_effective_at: float | None
    prompt_here: bool
    preemptions: int
    released: Mapping[str, int]
    paused_at: float | None = None
    received_bytes: int = 0

    @classmethod
    def unknown(cls, opened_at: float, now: float) -> "SeatReport":
        """Of a seat whose engine broke: nothing but its start and its end is known."""
        return cls(
            opened_at=opened_at,
            granted_at=None,
            begun_at=None,
            ready_at=None,
            first_token_at=None,
            last_token_at=None,
            ended_at=now,
            stop_hold_s=0.0,
            held_bytes=0,
            cancel_requested_at=None,
            cancel_observed_at=None,
            cancel_effective_at=None,
            prompt_here=True,
            preemptions=0,
            released={},
        )


class SeatEnded(NamedTuple):
    """The end of a seat; nothing about it follows."""

    seat: int
    ending: Ending
    usage: Usage
    report: SeatReport


SeatEvent = SeatGranted | SeatRefused | PromptScored | PromptReady | OutputMade | SeatPaused | SeatPushed | SeatEnded

# From the engine to the world


class AskDrain(NamedTuple):
    """Ask a prefill member to stop writing into a grant, after `delay_s`."""

    grant_id: str
    key: AttemptKey
    writer: Peer
    delay_s: float


class AskEndpoint(NamedTuple):
    """Ask the transfer thread for the endpoint of one writer incarnation."""

    writer: str


class AskFence(NamedTuple):
    """Ask the transfer thread to cut one writer incarnation off."""

    writer: str


class PushDrained(NamedTuple):
    """The answer to DrainPush: nothing is in flight and nothing will start. `committed`: every write had been done."""

    asker: int
    committed: bool


Errand = AskDrain | AskEndpoint | AskFence | PushDrained | Transfers

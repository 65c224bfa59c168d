"""How requests end: the closed lists of finish reasons and of failure labels, and what each pair means."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lifecycle.states import State


class FinishReason(Enum):
    """Why a request ended. None is ever disguised as another."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_SEQUENCE = "stop_sequence"
    GRAMMAR_COMPLETE = "grammar_complete"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CONTEXT_LIMIT = "context_limit"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CONTENT_INTERRUPTED = "content_interrupted"
    MODEL_ERROR = "model_error"
    TRANSPORT_ERROR = "transport_error"
    SLOW_CONSUMER = "slow_consumer"


class Cause(Enum):
    """What lies behind an ending that is not the model's or the request's own. Closed: metrics carry it."""

    NONE = ""
    # deadlines, one for each clock
    QUEUE_DEADLINE = "queue_deadline"
    FIRST_TOKEN_DEADLINE = "first_token_deadline"
    INTER_TOKEN_ENGINE = "inter_token_engine_stall"
    INTER_TOKEN_BACKPRESSURE = "inter_token_backpressure"
    INTER_TOKEN_NETWORK = "inter_token_network"
    OVERALL_DEADLINE = "overall_deadline"
    RPC_DEADLINE = "rpc_deadline"
    # cancels
    CLIENT_CANCEL = "client_cancel"
    CLIENT_GONE = "client_gone"
    DETACH_TIMEOUT = "detach_timeout"
    # members
    PREFILL_LOST = "prefill_lost"
    PREFILL_FAILED = "prefill_failed"
    DECODE_LOST = "decode_lost"
    HANDOVER_FAILED = "handover_failed"
    NO_MEMBER = "no_member"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    # the rest
    MODEL_FAILED = "model_failed"
    BAD_UTF8 = "bad_utf8"
    GRAMMAR_FAILED = "grammar_failed"
    SLOW_CONSUMER = "slow_consumer"
    SHUTTING_DOWN = "shutting_down"
    MOVED = "moved"  # of a seat only: its sequence goes on at another member
    ROUTER_LOST = "router_lost"
    STORE_LOST = "store_lost"


#: Reasons with which a request is FINISHED and its RPC is OK.
COMPLETE: frozenset[FinishReason] = frozenset(
    {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.STOP_SEQUENCE,
        FinishReason.GRAMMAR_COMPLETE,
        FinishReason.MAX_OUTPUT_TOKENS,
        FinishReason.CONTEXT_LIMIT,
        FinishReason.CONTENT_INTERRUPTED,
    }
)


@dataclass(frozen=True, slots=True)
class Ending:
    """An ending as decided once: the reason, its cause and what matched."""

    reason: FinishReason
    cause: Cause = Cause.NONE
    matched_stop: str = ""
    matched_token_id: int | None = None

    def state(self, returned_tokens: int) -> State:
        """The terminal state. A deadline after something was returned finishes with a partial result."""
        if self.reason in COMPLETE:
            return State.FINISHED
        if self.reason is FinishReason.CANCELLED:
            return State.CANCELLED
        if self.reason is FinishReason.DEADLINE_EXCEEDED and returned_tokens > 0:
            return State.FINISHED
        return State.FAILED

    @property
    def goes_on(self) -> bool:
        """Whether it is the end of a seat only: the output can go on at another member."""
        return self.reason is FinishReason.TRANSPORT_ERROR or self.cause is Cause.MOVED


#: What ends a request in the model or on the way and still is not the cell's failure: the client asked for it.
_ASKED_FOR = frozenset({Cause.GRAMMAR_FAILED, Cause.BAD_UTF8})


def is_failure(ending: Ending) -> bool:
    """Whether the cell failed the request: not a client's cancel, its own deadline, its grammar, or its slow reading."""
    if ending.reason in (FinishReason.MODEL_ERROR, FinishReason.TRANSPORT_ERROR):
        return ending.cause not in _ASKED_FOR
    return ending.cause is Cause.INTER_TOKEN_ENGINE


def of_choices(endings: Sequence[Ending]) -> Ending:
    """How a request with several choices ended, from theirs by index: as the first that ended in order, else as the first."""
    return next((one for one in endings if one.reason in COMPLETE), endings[0])

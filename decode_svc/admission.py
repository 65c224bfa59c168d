"""Which Open gets no seat, and why. Pure; a refusal names the limit that was met."""

from dataclasses import dataclass

#: Closed labels of decode.proto.
DRAINING = "draining"
UNKNOWN_MODEL = "unknown_model"
WRONG_INCARNATION = "wrong_incarnation"
NO_PAGES = "no_pages"
NO_LANDING_ROW = "no_landing_row"
TOO_MANY_SEQUENCES = "too_many_sequences"
TOO_LONG = "too_long"
DUPLICATE_ATTEMPT = "duplicate_attempt"
INBOX_FULL = "inbox_full"

REFUSALS = (
    DRAINING,
    UNKNOWN_MODEL,
    WRONG_INCARNATION,
    NO_PAGES,
    NO_LANDING_ROW,
    TOO_MANY_SEQUENCES,
    TOO_LONG,
    DUPLICATE_ATTEMPT,
    INBOX_FULL,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No seat. `retryable`: another member could give one."""

    reason: str
    detail: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """What this member is: fixed from its start. `address`: host:port for its peers."""

    member: str
    incarnation: str
    address: str
    model_snapshot: str
    context_tokens: int
    vocabulary_size: int
    computes_prompts: bool


def mismatch(me: Identity, incarnation: str, model_snapshot: str, tokens: int) -> Refusal | None:
    """Refuse what this member can never serve, however empty it is. `tokens`: prompt and max_output_tokens together."""
    if incarnation != me.incarnation:
        return Refusal(WRONG_INCARNATION, f"incarnation {incarnation!r} was meant, this is {me.incarnation!r}", True)
    if model_snapshot != me.model_snapshot:
        return Refusal(UNKNOWN_MODEL, f"model_snapshot {model_snapshot!r} was meant, {me.model_snapshot!r} is loaded", True)
    if tokens > me.context_tokens:
        limit = me.context_tokens
        return Refusal(TOO_LONG, f"prompt and max_output_tokens are {tokens} tokens together, context_tokens is {limit}", False)
    return None

"""Which Open gets no seat, and why. Pure; a refusal names the limit that was met."""

from dataclasses import dataclass

from decode_svc.handover import Handovers
from decode_svc.memory import DecodeMemory, Wanted
from decode_svc.messages import OpenSeat
from engine.sequence import Sequence as TokenSequence
from lifecycle.adapters import Adapter
from member.adapters import lacks_adapter

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
UNKNOWN_ATTEMPT = "unknown_attempt"
BAD_GRAMMAR = "bad_grammar"
GRAMMAR_COSTLY = "grammar_costly"
GRAMMAR_BUSY = "grammar_busy"
CANCELLED = "cancelled"
PREFIX_GONE = "prefix_gone"
UNKNOWN_ADAPTER = "unknown_adapter"

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
    UNKNOWN_ATTEMPT,
    BAD_GRAMMAR,
    GRAMMAR_COSTLY,
    GRAMMAR_BUSY,
    CANCELLED,
    PREFIX_GONE,
    UNKNOWN_ADAPTER,
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
    adapters: tuple[Adapter, ...] = ()


def duplicate_attempt(attempt: int) -> Refusal:
    """An attempt opens one seat. The next attempt gets one: who asks is another owner of the request, as after a store has lost
    its memory, and the ends of both meet in the store."""
    return Refusal(DUPLICATE_ATTEMPT, f"attempt {attempt} of this request has a seat already", True)


def too_many_sequences(wanted: int, limit: int) -> Refusal:
    """Every sequence has its place in the books and in the steps."""
    if wanted > limit:
        return Refusal(TOO_MANY_SEQUENCES, f"{wanted} sequences are wanted, max_sequences is {limit}", True)
    return Refusal(TOO_MANY_SEQUENCES, f"all {limit} sequences are taken", True)


def too_long(tokens: int, outputs: int, most_tokens: int) -> Refusal:
    """What no idle member of this size could hold."""
    each = (
        f"{tokens} tokens of KV are needed" if outputs == 1 else f"{tokens} tokens of KV are needed for each of {outputs} outputs"
    )
    return Refusal(TOO_LONG, f"{each}, this member holds at most {most_tokens}", True)


def handover_refusal(handovers: Handovers, memory: DecodeMemory, writer: str, *, with_row: bool) -> Refusal | None:
    """Refuse what can not be offered to this writer now."""
    if handovers.suspect(writer):
        detail = f"prefill incarnation {writer!r} is being cut off: name another prefill member"
        return Refusal(WRONG_INCARNATION, detail, True)
    if handovers.full:
        return Refusal(NO_LANDING_ROW, f"all {handovers.grants_max} open grants are in use", True)
    if with_row and memory.landing_rows_used >= memory.landing_rows:
        return Refusal(NO_LANDING_ROW, f"all {memory.landing_rows} landing rows are held", True)
    return None


def wanted(command: OpenSeat, sequence: TokenSequence) -> Wanted:
    """What the pages of a new seat are to hold. Of a prompt that is computed here the last token is fed in any case, for its
    logits; of a sequence that moves here at least one page is sent, which is what tells that it has come.

    A prompt whose log-probabilities are wanted is computed whole.
    """
    given, received = sequence.given_token_ids, command.prefill is not None
    if command.siblings is not None:
        # What all of them begin with.
        prompt = sequence.spec.prompt_token_ids
        most = 0 if sequence.spec.scores_prompt else len(prompt) - (not received)
        return Wanted(command.salt, prompt, most, received)
    if command.moved:
        return Wanted(command.salt, given[:-1], len(given) - 2, received)
    if sequence.spec.scores_prompt:
        return Wanted(command.salt, given, 0)
    return Wanted(command.salt, given, len(given) - (not received), received)


def prefix_gone(lacking: int, most: int | None) -> Refusal | None:
    """Refuse to compute more of a prompt here than the router has reckoned with: its hint about the cache was wrong."""
    if most is None or lacking <= most:
        return None
    return Refusal(PREFIX_GONE, f"{lacking} tokens would have to be computed here, the router wants at most {most}", True)


def cannot_adopt(me: Identity, incarnation: str, attempt: int, *, known: bool) -> Refusal | None:
    """Refuse an Adopt that means another process, or a seat that is gone, was never here or is not held."""
    if incarnation != me.incarnation:
        return Refusal(WRONG_INCARNATION, f"incarnation {incarnation!r} was meant, this is {me.incarnation!r}", False)
    if not known:
        return Refusal(UNKNOWN_ATTEMPT, f"attempt {attempt} of this request has no seat that can be adopted", False)
    return None


def mismatch(me: Identity, incarnation: str, model_snapshot: str, tokens: int, adapter: Adapter | None = None) -> Refusal | None:
    """Refuse what this member can never serve, however empty it is. `tokens`: prompt and max_output_tokens together."""
    if incarnation != me.incarnation:
        return Refusal(WRONG_INCARNATION, f"incarnation {incarnation!r} was meant, this is {me.incarnation!r}", True)
    if model_snapshot != me.model_snapshot:
        return Refusal(UNKNOWN_MODEL, f"model_snapshot {model_snapshot!r} was meant, {me.model_snapshot!r} is loaded", True)
    lacking = lacks_adapter(me.adapters, adapter)
    if lacking:
        return Refusal(UNKNOWN_ADAPTER, lacking, True)
    if tokens > me.context_tokens:
        limit = me.context_tokens
        return Refusal(TOO_LONG, f"prompt and max_output_tokens are {tokens} tokens together, context_tokens is {limit}", False)
    return None

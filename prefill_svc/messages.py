"""What the actors of a prefill member tell one another."""

from dataclasses import dataclass

from kv_transfer.grant_writer import TRANSFER_FAILED, PushesEnded
from kv_transfer.plan import HandoverPlan
from lifecycle.record import AttemptKey

# Closed labels of PrefillFailed.
DRAINING = "draining"
UNKNOWN_MODEL = "unknown_model"
WRONG_INCARNATION = "wrong_incarnation"
LAYOUT_MISMATCH = "layout_mismatch"
BAD_GRANT = "bad_grant"
QUEUE_FULL = "queue_full"
TOO_LONG = "too_long"
REVOKED = "revoked"
DEADLINE = "deadline"
LEASE_EXPIRED = "lease_expired"
MODEL_ERROR = "model_error"
UNKNOWN_ADAPTER = "unknown_adapter"
ABANDONED = "abandoned"

#: What another member may not share: what it has loaded and how it is laid out (members of old and new settings serve beside
#: each other while they are replaced), how full it is, which other prompts were in the step that failed.
RETRYABLE = frozenset(
    {
        *(DRAINING, WRONG_INCARNATION, UNKNOWN_MODEL, LAYOUT_MISMATCH, QUEUE_FULL, TOO_LONG, UNKNOWN_ADAPTER),
        *(REVOKED, TRANSFER_FAILED, LEASE_EXPIRED, MODEL_ERROR),
    }
)


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute a prompt and fill a grant. remaining_s: seconds until the request's clock runs out; None is no limit.

    salt: for the prefix cache, of tenant and adapter; empty: the prompt has nothing to do with it. adapter: name of the one that
    computes it; empty: the base model.
    """

    key: AttemptKey
    plan: HandoverPlan
    prompt_token_ids: tuple[int, ...]
    priority: int
    remaining_s: float | None
    salt: bytes = b""
    adapter: str = ""

    @property
    def grant_id(self) -> str:
        """The grant to fill."""
        return self.plan.grant.grant_id


@dataclass(frozen=True, slots=True)
class Abandon:
    """The router ended the call: stop before the next chunk."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Decode wants a grant back. `asker` names the waiting call."""

    grant_id: str
    asker: int


@dataclass(frozen=True, slots=True)
class Close:
    """Take nothing new (expel=False), or give up everything that runs (expel=True)."""

    expel: bool


@dataclass(frozen=True, slots=True)
class Recount:
    """Recount everything that is held. `asker` names the waiting call."""

    asker: int


Command = Submit | Abandon | Drain | PushesEnded | Close | Recount


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is in the queue; so many tokens are computed before it."""

    grant_id: str
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Positions of the prompt computed so far, and how many of them were in the cache; `at`: when that chunk ended, in monotonic
    seconds."""

    grant_id: str
    computed_tokens: int
    at: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts and times (seconds) of one finished hand-over."""

    cached_tokens: int
    sent_bytes: int
    queue_s: float
    compute_s: float
    handover_s: float
    exposed_s: float
    post_s: float


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything is written."""

    grant_id: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Failed:
    """The grant will not be filled."""

    grant_id: str
    cause: str
    detail: str

    @property
    def retryable(self) -> bool:
        """Whether another member could succeed."""
        return self.cause in RETRYABLE


@dataclass(frozen=True, slots=True)
class Drained:
    """The answer to a Drain: nothing is in flight and nothing will start. committed: every write had been done."""

    asker: int
    committed: bool


@dataclass(frozen=True, slots=True)
class Recounted:
    """What is held, by name, and sentences about what does not add up."""

    asker: int
    books: dict[str, int]
    faults: tuple[str, ...]


Output = Accepted | Progress | Committed | Failed | Drained | Recounted

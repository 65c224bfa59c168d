"""A request that has passed validation. Nothing behind the servicer sees the message it came from."""

from dataclasses import dataclass
from enum import Enum

from lifecycle.adapters import Adapter
from lifecycle.deadlines import Limits
from lifecycle.prefix_keys import adapted_salt, tenant_salt
from text.grammar_rule import GrammarRule


class OutputMode(Enum):
    """How output is delivered."""

    DELTA = "delta"
    FINAL_ONLY = "final_only"
    CUMULATIVE = "cumulative"


class Utf8Policy(Enum):
    """What happens to bytes at the end that are no whole character; UNSET leaves it to the way of ending."""

    UNSET = "unset"
    ERROR = "error"
    DROP = "drop"


class SlowReader(Enum):
    """What happens when output is made faster than it is read. A decode member coalesces or pauses; a router only waits."""

    PAUSE = "pause"
    COALESCE = "coalesce"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request's output reaches whoever reads it.

    `detach_s` is how long the request may run on without a reader, in seconds; None ends it when the last reader leaves.
    `log_probs`: for how many most likely tokens log-probabilities are told beside each returned one's own; None tells none.
    `scores_prompt`: those of the prompt too. `echo_prompt`: the prompt is told before the output.
    """

    output_mode: OutputMode = OutputMode.DELTA
    slow_reader: SlowReader = SlowReader.PAUSE
    detach_s: float | None = None
    log_probs: int | None = None
    scores_prompt: bool = False
    echo_prompt: bool = False

    @property
    def whole(self) -> bool:
        """Whether a single event holds all of the output."""
        return self.output_mode is not OutputMode.DELTA


@dataclass(frozen=True, slots=True)
class Choices:
    """How many outputs of the prompt are made, and how many of them are told: fewer are the likeliest, when all have ended."""

    told: int = 1
    made: int = 1

    @property
    def several(self) -> bool:
        """Whether outputs are told apart, and each has an end of its own."""
        return self.made > 1

    @property
    def ranked(self) -> bool:
        """Whether only the likeliest are told."""
        return self.told < self.made


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen; every value is inside the range that the port documents."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends the output."""

    sequences: tuple[str, ...]
    token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool
    min_output_tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a router answers for. `context_tokens` bounds prompt and output together."""

    name: str
    snapshot: str
    context_tokens: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is not in tokens yet: exactly one of the three is set. `field` is its path in the message."""

    field: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatTurn, ...] | None = None

    @property
    def size(self) -> int:
        """Characters to tokenise."""
        if self.text is not None:
            return len(self.text)
        return sum(len(turn.content) for turn in self.chat or ())


@dataclass(frozen=True, slots=True)
class Examined:
    """A request whose fields are all in range and whose prompt is not in tokens yet."""

    request_id: str
    tenant: str
    fingerprint: str
    model: ServedModel
    prompt: Prompt
    sampling: Sampling
    stop: Stop
    max_output_tokens: int | None
    delivery: Delivery
    utf8_policy: Utf8Policy
    priority: int
    limits: Limits
    grammar: GrammarRule | None = None
    choices: Choices = Choices()
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """What was asked for, checked and tokenised.

    `fingerprint` is a hash of the body as the client sent it (without the id): the same id with another fingerprint is
    another request. `limits` hold the request's own clocks with the server's defaults filled in, in seconds. `grammar`: what the
    output must be. `adapter`: with the content that its members must have; None: the base model.
    """

    request_id: str
    tenant: str
    fingerprint: str
    model: ServedModel
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: Stop
    max_output_tokens: int
    delivery: Delivery
    utf8_policy: Utf8Policy
    priority: int
    limits: Limits
    grammar: GrammarRule | None = None
    choices: Choices = Choices()
    adapter: Adapter | None = None

    @property
    def prefix_salt(self) -> bytes:
        """What the keys of its pages begin with at every member."""
        return adapted_salt(tenant_salt(self.tenant), self.adapter)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def total_tokens(self) -> int:
        """Most tokens that prompt and output can come to."""
        return len(self.prompt_token_ids) + self.max_output_tokens

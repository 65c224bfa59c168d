"""Every bound on a client's request, with its name and unit, in one place."""

from dataclasses import dataclass, field

from lifecycle.deadlines import Limits

REQUEST_ID_BYTES = 128
MODEL_NAME_BYTES = 256
CANCEL_REASON_BYTES = 256
TENANT_BYTES = 128
TEXT_BYTES = 4 * 1024 * 1024
CHAT_MESSAGES = 1024
HTTP_PROMPTS = 128
STOP_SEQUENCES = 16
STOP_SEQUENCE_BYTES = 256
STOP_TOKEN_IDS = 64
LOGIT_BIAS_ENTRIES = 300
LOGIT_BIAS = 100.0
TEMPERATURE = 10.0
PENALTY = 2.0
REPETITION_PENALTY = 10.0
PRIORITY = 10
#: Roles that chat templates know.
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one cell sets for all requests: defaults and maxima of the clocks in seconds, the default output length, and
    how long a detached request may run on without a reader, in seconds.

    max_choices: outputs of one prompt. max_log_probs: most likely tokens that are told beside a returned one.
    max_whole_log_probs: log-probabilities in an event that holds all of an output.
    """

    default_max_output_tokens: int = 256
    clock_defaults: Limits = field(default_factory=lambda: Limits(30.0, 60.0, 30.0, 600.0))
    clock_maxima: Limits = field(default_factory=lambda: Limits(300.0, 600.0, 300.0, 3600.0))
    default_detach_s: float = 60.0
    max_detach_s: float = 3600.0
    max_choices: int = 8
    max_log_probs: int = 20
    max_whole_log_probs: int = 131_072

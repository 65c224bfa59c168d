"""Token counts and times of a request, as values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, right on every ending.

    cached_prompt_tokens <= prompt_tokens; returned_tokens <= billed_tokens <= selected_tokens;
    processed_tokens counts tokens whose KV is in the cache.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    selected_tokens: int = 0
    processed_tokens: int = 0
    returned_tokens: int = 0
    billed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds. Fields of a phase that did not happen are 0; of a cancel that did not, None."""

    queue_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    handover_exposed_s: float = 0.0
    decode_s: float = 0.0
    stop_hold_s: float = 0.0
    send_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    cancel_observed_s: float | None = None
    cancel_effective_s: float | None = None

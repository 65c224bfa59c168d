"""Token counts and times of a request, as values."""

from collections.abc import Sequence
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


def together(usages: Sequence[Usage]) -> Usage:
    """Counts of several outputs of one prompt, at least one: the prompt and what a cache had of it once, the rest added up."""
    prompt = max(one.prompt_tokens for one in usages)
    return Usage(
        prompt_tokens=prompt,
        cached_prompt_tokens=max(one.cached_prompt_tokens for one in usages),
        selected_tokens=sum(one.selected_tokens for one in usages),
        processed_tokens=max(min(prompt, one.processed_tokens) for one in usages)
        + sum(max(0, one.processed_tokens - prompt) for one in usages),
        returned_tokens=sum(one.returned_tokens for one in usages),
        billed_tokens=sum(one.billed_tokens for one in usages),
    )


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds. Fields of a phase that did not happen are 0; of a cancel that did not, None."""

    check_s: float = 0.0
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

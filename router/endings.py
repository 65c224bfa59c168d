"""What a terminal state means for the RPC: the table "How requests end" as code."""

import math

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from router.queue import QueueFull, WaitTooLong
from router.refused import RETRY_AFTER_MAX_S, RETRY_AFTER_S
from router.tenant_limits import Limit, OverLimit
from rpc.details import Quota, Resource, Violation
from rpc.status import (
    StatusError,
    already_exists,
    cancelled,
    deadline_exceeded,
    internal,
    invalid_argument,
    not_found,
    out_of_range,
    resource_exhausted,
    slow_consumer,
    unavailable,
)

#: Reasons of refusals at the door, by the label under which they are counted.
REFUSAL_LABELS = {
    "QUEUE_FULL": "queue_full",
    "QUEUE_TOKENS_FULL": "queue_tokens_full",
    "TENANT_QUEUE_FULL": "tenant_limit",
    "QUEUE_WAIT": "queue_wait",
    "TENANT_REQUEST_RATE": "tenant_request_rate",
    "TENANT_TOKEN_RATE": "tenant_token_rate",
    "TENANT_CONCURRENCY": "tenant_concurrency",
    "TOKEN_REQUIRED": "unauthenticated",
    "INVALID_TOKEN": "unauthenticated",
    "KEYS_UNAVAILABLE": "keys_away",
    "TOKENISER_BUSY": "queue_full",
    "GRAMMAR_BUSY": "queue_full",
    "NO_MEMBER": "no_member",
    "STORE_UNAVAILABLE": "store_away",
    "DRAINING": "draining",
    "UNKNOWN_MODEL": "unknown_model",
    "UNKNOWN_ADAPTER": "unknown_adapter",
    "ADAPTER_MISMATCH": "unknown_adapter",
    "IDEMPOTENCY_KEY_REUSED": "id_conflict",
}
_QUEUE_REASONS = {
    "max_requests": ("QUEUE_FULL", "requests"),
    "max_tokens": ("QUEUE_TOKENS_FULL", "tokens"),
    "max_tenant_requests": ("TENANT_QUEUE_FULL", "requests"),
}
_TENANT_REASONS = {
    Limit.REQUEST_RATE: ("TENANT_REQUEST_RATE", "requests a second"),
    Limit.TOKEN_RATE: ("TENANT_TOKEN_RATE", "tokens a second"),
    Limit.CONCURRENCY: ("TENANT_CONCURRENCY", "requests at a time"),
}
#: Reasons for which a tenant gets no new request. That of the rate of requests is none of them: what comes too often is refused
#: before anything is asked about it.
TENANT_SHORT = frozenset({"TENANT_TOKEN_RATE", "TENANT_CONCURRENCY"})
#: Reason of the refusal of an id that nobody knows.
UNKNOWN_REQUEST = "UNKNOWN_REQUEST"


def status_of(record: RequestRecord) -> StatusError | None:
    """The status after the terminal event of a record that has ended; None is OK."""
    ending = record.ending or Ending(FinishReason.TRANSPORT_ERROR)
    if record.state is State.CANCELLED:
        return cancelled(f"request {record.request_id!r} was cancelled", _label(ending.cause) or "CANCELLED")
    if ending.reason is FinishReason.DEADLINE_EXCEEDED:
        if record.state is State.FINISHED and ending.cause is not Cause.RPC_DEADLINE:
            return None
        clock = ending.cause.value.replace("_", " ") or "deadline"
        return deadline_exceeded(f"request {record.request_id!r}: {clock}", _label(ending.cause) or "DEADLINE_EXCEEDED")
    if record.state is State.FINISHED:
        return None
    return _failure(record.request_id, ending)


def _failure(request_id: str, ending: Ending) -> StatusError:
    if ending.cause is Cause.GRAMMAR_FAILED:
        description = "it came to a place where it allows none of the model's tokens, or takes too long to say which"
        return invalid_argument([Violation("grammar", description, "GRAMMAR_FAILED")], "GRAMMAR_FAILED")
    if ending.reason is FinishReason.MODEL_ERROR:
        return internal(request_id)
    if ending.reason is FinishReason.SLOW_CONSUMER:
        return slow_consumer(f"request {request_id!r}: its reader did not keep up")
    what = ending.cause.value.replace("_", " ") or "transport error"
    return unavailable(f"request {request_id!r}: {what}", _label(ending.cause) or "TRANSPORT_ERROR")


def id_reused(request_id: str) -> StatusError:
    """The id belongs to a request with another body."""
    message = f"request_id {request_id!r} was used before with another body; choose a new one"
    return already_exists(Resource("request", request_id), "IDEMPOTENCY_KEY_REUSED", message)


def unknown_request(request_id: str) -> StatusError:
    """There is no such request, or it is somebody else's."""
    return not_found(Resource("request", request_id), UNKNOWN_REQUEST)


def replay_gone(request_id: str, first_no: int) -> StatusError:
    """Events that were asked for are not kept any more; those from `first_no` on are."""
    message = f"request {request_id!r}: events before {first_no} are not kept any more"
    return out_of_range(message, "REPLAY_GONE", firstSequenceNo=str(first_no))


def beyond_end(next_no: int, limit: int) -> StatusError:
    """The wanted event is further ahead than the next one."""
    description = f"must be at most {limit}, the number of the next event; got {next_no}"
    return invalid_argument([Violation("next_sequence_no", description, "OUT_OF_RANGE")])


def store_away(retry_after_s: float) -> StatusError:
    """Without the store it is not known what the request is."""
    return unavailable("the request store does not answer; try again", "STORE_UNAVAILABLE", retry_after_s=retry_after_s)


def queue_full(full: QueueFull, tenant: str) -> StatusError:
    """There is no room to wait in."""
    reason, unit = _QUEUE_REASONS[full.limit]
    subject = f"tenant:{tenant}" if full.limit == "max_tenant_requests" else "cell"
    description = f"waiting {unit} are at the limit of {full.bound}"
    return resource_exhausted(
        f"the queue is full: {description}; try again",
        reason,
        retry_after_s=RETRY_AFTER_S if full.after_s is None else full.after_s,
        quotas=[Quota(subject, description, f"queue_{unit}", full.limit, full.bound)],
    )


def wait_too_long(long: WaitTooLong) -> StatusError:
    """The request would wait for too long: it is told so at once, and when its turn will be."""
    words = "the queue does not move" if long.wait_s > RETRY_AFTER_MAX_S else f"the wait would be about {long.wait_s:.0f} s"
    description = f"{words}, and the queue clock leaves {long.left_s:.0f} s"
    return resource_exhausted(
        f"{description}; try again later",
        "QUEUE_WAIT",
        retry_after_s=long.after_s,
        quotas=[Quota("cell", description, "queue_seconds", "queue_clock", math.floor(long.left_s))],
    )


def over_limit(over: OverLimit, tenant: str) -> StatusError:
    """The tenant asks this router for more than it may."""
    reason, unit = _TENANT_REASONS[over.limit]
    description = f"the tenant's limit is {over.bound:g} {unit}"
    return resource_exhausted(
        f"{description}; try again",
        reason,
        retry_after_s=RETRY_AFTER_S if over.wait_s is None else over.wait_s,
        quotas=[Quota(f"tenant:{tenant}", description, over.limit.value, over.limit.value, math.ceil(over.bound))],
    )


def no_member() -> StatusError:
    """The pools have nobody who takes work."""
    return unavailable("no decode member, or no prefill member, takes work now; try again", "NO_MEMBER")


def scores_no_prompts() -> StatusError:
    """The decode members do not compute prompts, so nobody tells how likely a prompt was."""
    words = "no decode member of this cell computes prompts (--computes-prompts), which this needs"
    return invalid_argument([Violation("log_probabilities.prompt", words, "NOT_SERVED")])


def _label(cause: Cause) -> str:
    return cause.value.upper()

"""What the next attempt at a request goes on from."""

from router.pool_messages import Resume
from router.progress import Progress
from router.relay import RequestStream


def resume_of(progress: Progress, stream: RequestStream, now: float) -> Resume:
    """What earlier attempts have brought, at monotonic time `now`."""
    whole = stream.whole_before(stream.log.next_no)
    since_s = now - progress.last_output_at if progress.last_output_at else None
    if progress.choices:
        told = tuple(one.message(whole.returned(one.index) if whole is not None else b"") for one in progress.choices)
        return Resume(since_last_token_s=since_s, choices=told)
    return Resume(
        output_token_ids=tuple(progress.output_token_ids),
        sent_text_bytes=progress.text_bytes,
        returned_tokens=progress.returned_tokens,
        since_last_token_s=since_s,
        held_log_probs=progress.held_log_probs,
        returned=whole.returned() if whole is not None else b"",
    )

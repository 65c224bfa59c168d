"""Whether the text that a client was told is right, as far as it goes."""

from typing import Any

from tandem.v1 import inference_pb2 as pb
from tests.simulation.model import Reference


def text_fault(reference: Reference, before: str, text: str, completed: Any = None, *, same_run: bool = True) -> str:
    """What is wrong with `text` after an event that found `before`, and was the end if it is `completed`; empty when nothing is.

    Text is a beginning of what the undisturbed request says, with one exception: an end from outside (a cancel, a clock, a
    failure) shows what was held back for a stop that had not come to its end. In the undisturbed text that stop may have come,
    so more than it is right in the last output only, and only as far as the tokens that were chosen until then bring it out.
    same_run: the end is that of the run whose text this is, so its counts are too.
    """
    if completed is None and not reference.text.startswith(before):
        return f"text went on to {text!r} after {before!r}, which is right at the end only"
    counted = completed is not None and same_run and completed.HasField("usage")
    if counted and _cut_off(reference, completed):
        right = [reference.ended_after(completed.usage.selected_tokens)[0]]
    elif reference.text.startswith(text):
        return ""
    elif counted:
        right = [reference.text]
    else:
        # How many tokens were chosen is told with the end of that run, unless its router was lost.
        right = [reference.text, *(reference.ended_after(chosen)[0] for chosen in range(len(reference.tokens)))]
    if any(one.startswith(text) for one in right):
        return ""
    return f"text {text!r} is no beginning of {right[0]!r}"


def output_of(events: dict[int, Any]) -> tuple[str, list[int]] | None:
    """Text and tokens that events bring, by number and however they came; None while one before the last is missing."""
    text, tokens = "", list[int]()
    for number in range(max(events, default=-1) + 1):
        if number not in events:
            return None
        event = events[number]
        kind = event.WhichOneof("event")
        if kind in ("delta", "completed"):
            output = getattr(event, kind)
            if kind == "delta" and output.cumulative:
                text, tokens = "", []
            text += output.text
            tokens += output.token_ids
    return text, tokens


def most_returned(reference: Reference, completed: Any) -> int:
    """How many tokens a request that ended like this can have returned."""
    if _cut_off(reference, completed):
        return reference.ended_after(completed.usage.selected_tokens)[1]
    return reference.usage.returned_tokens


def usual_reason(reference: Reference) -> int:
    """The undisturbed end, as clients are told it."""
    return int(pb.FinishReason.Value(f"FINISH_REASON_{reference.ending.reason.name}"))


def _cut_off(reference: Reference, completed: Any) -> bool:
    """Whether an end came from outside, before the last token."""
    own = completed.finish_reason == usual_reason(reference)
    return not own and completed.usage.selected_tokens < len(reference.tokens)

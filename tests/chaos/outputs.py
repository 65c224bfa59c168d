"""What a stream brought of each output, put together from its events. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Output:
    """One output so far. `finish_reason`: None until it has ended."""

    text: str = ""
    tokens: int = 0
    matched_stop: str = ""
    finish_reason: int | None = None


def outputs_of(events: Iterable[pb.GenerateResponse], *, several: bool) -> dict[int, Output]:
    """The outputs by index, of the events in order. several: each has an end of its own; else the request's is its only one's.

    Raises AssertionError when an output goes on after its end.
    """
    outputs: dict[int, Output] = {}
    for event in events:
        kind = event.WhichOneof("event")
        if kind in ("delta", "choice_ended"):
            told = getattr(event, kind)
            output = outputs.setdefault(told.index, Output())
            assert output.finish_reason is None, f"output {told.index} goes on after its end: {event}"
            output.text += told.text
            output.tokens += len(told.token_ids)
            if kind == "choice_ended":
                output.matched_stop, output.finish_reason = told.matched_stop, told.finish_reason
        elif kind == "completed" and not several:
            output = outputs.setdefault(0, Output())
            output.text += event.completed.text
            output.matched_stop, output.finish_reason = event.completed.matched_stop, event.completed.finish_reason
    return outputs

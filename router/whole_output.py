"""All that a request has returned up to an event: what a Delta holds with OUTPUT_MODE_CUMULATIVE.

Nobody stores such Deltas: streams keep what is new in each event, and a reader's are made when they are written to it.
"""

from typing import Any

from tandem.v1 import inference_pb2 as pb


class WholeOutput:
    """Grows by what events bring. `returned`: what was there before, as a serialised Delta."""

    def __init__(self, returned: bytes = b"") -> None:
        self._delta: Any = pb.Delta.FromString(returned)

    def take(self, event: bytes) -> None:
        """One more event, a serialised GenerateResponse."""
        self._take(pb.GenerateResponse.FromString(event))

    def join(self, returned: bytes) -> None:
        """What was returned next, as a serialised Delta."""
        self._add(pb.Delta.FromString(returned))

    def shown(self, event: bytes) -> bytes:
        """The event as its reader gets it: a Delta with all of the output up to it."""
        message: Any = pb.GenerateResponse.FromString(event)
        if not self._take(message):
            return event
        message.delta.CopyFrom(self._delta)
        message.delta.cumulative = True
        data: bytes = message.SerializeToString()
        return data

    @property
    def size_bytes(self) -> int:
        """What it takes, serialised."""
        return int(self._delta.ByteSize())

    def returned(self) -> bytes:
        """All of it, as a serialised Delta."""
        data: bytes = self._delta.SerializeToString()
        return data

    def _take(self, message: Any) -> bool:
        if message.WhichOneof("event") != "delta":
            return False
        self._add(message.delta)
        return True

    def _add(self, delta: Any) -> None:
        self._delta.text += delta.text
        self._delta.token_ids.extend(delta.token_ids)
        self._delta.log_probabilities.extend(delta.log_probabilities)

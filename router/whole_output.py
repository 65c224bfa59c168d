"""All that a request has returned up to an event: what a Delta holds with OUTPUT_MODE_CUMULATIVE.

Nobody stores such Deltas: streams keep what is new in each event, and a reader's are made when they are written to it. Several
outputs of one prompt are kept apart, by index.
"""

from typing import Any

from tandem.v1 import inference_pb2 as pb


class WholeOutput:
    """Grows by what events bring."""

    def __init__(self) -> None:
        self._deltas: dict[int, Any] = {}

    def take(self, event: bytes) -> None:
        """One more event, a serialised GenerateResponse."""
        self._take(pb.GenerateResponse.FromString(event))

    def join(self, returned: bytes, index: int = 0) -> None:
        """What was returned next of an output, as a serialised Delta."""
        self._add(index, pb.Delta.FromString(returned))

    def shown(self, event: bytes) -> bytes:
        """The event as its reader gets it: with all of the output up to it."""
        message: Any = pb.GenerateResponse.FromString(event)
        told = self._take(message)
        if told is None:
            return event
        whole = self._deltas[told.index]
        told.text = whole.text
        for name in ("token_ids", "log_probabilities"):
            told.ClearField(name)
            getattr(told, name).extend(getattr(whole, name))
        if message.WhichOneof("event") == "delta":
            told.cumulative = True
        data: bytes = message.SerializeToString()
        return data

    @property
    def size_bytes(self) -> int:
        """What it takes, serialised."""
        return sum(int(delta.ByteSize()) for delta in self._deltas.values())

    def returned(self, index: int = 0) -> bytes:
        """All of an output, as a serialised Delta."""
        data: bytes = self._deltas[index].SerializeToString() if index in self._deltas else b""
        return data

    def copy(self) -> "WholeOutput":
        """One that grows apart from this."""
        other = WholeOutput()
        for index in self._deltas:
            other.join(self.returned(index), index)
        return other

    def _take(self, message: Any) -> Any | None:
        kind = message.WhichOneof("event")
        if kind not in ("delta", "choice_ended"):
            return None
        told = getattr(message, kind)
        self._add(told.index, told)
        return told

    def _add(self, index: int, told: Any) -> None:
        delta = self._deltas.setdefault(index, pb.Delta())
        delta.text += told.text
        delta.token_ids.extend(told.token_ids)
        delta.log_probabilities.extend(told.log_probabilities)

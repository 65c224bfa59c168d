"""The two shapes of answers, each with what it has to remember of a stream's choices. Pure."""

from typing import Any

from router.http import chat, completion
from router.http.asking import Call
from router.http.log_probs import LegacyLogProbs
from router.http.reading import Output, Piece


class CompletionShape:
    """Answers of /v1/completions."""

    object = completion.OBJECT
    chunk_object = completion.CHUNK_OBJECT

    def __init__(self, call: Call) -> None:
        self._log_probs = call.log_probs
        self._told: dict[int, LegacyLogProbs] = {}

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        told = self._told.setdefault(piece.index, LegacyLogProbs()) if self._log_probs else None
        return completion.choice(piece, told)

    def whole_choice(self, output: Output) -> dict[str, Any]:
        """See Shape."""
        return completion.whole_choice(output, self._log_probs)


class ChatShape:
    """Answers of /v1/chat/completions."""

    object = chat.OBJECT
    chunk_object = chat.CHUNK_OBJECT

    def __init__(self, call: Call) -> None:
        self._log_probs = call.log_probs
        self._begun: set[int] = set()

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        return chat.choice(piece, first=first, log_probs=self._log_probs)

    def whole_choice(self, output: Output) -> dict[str, Any]:
        """See Shape."""
        return chat.whole_choice(output, self._log_probs)

"""The events of one request as what OpenAI's clients are told: pieces of choices, and counts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from router.http.errors import HttpError
from tandem.v1 import inference_pb2 as pb

_FINISH_REASONS: dict[Any, str] = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop",
    pb.FINISH_REASON_GRAMMAR_COMPLETE: "stop",
    pb.FINISH_REASON_MAX_OUTPUT_TOKENS: "length",
    pb.FINISH_REASON_CONTEXT_LIMIT: "length",
    pb.FINISH_REASON_DEADLINE_EXCEEDED: "length",
    pb.FINISH_REASON_CONTENT_INTERRUPTED: "content_filter",
}
#: What vLLM says of a choice that was cancelled or failed while others went on.
_ABORTED = "abort"
#: Label of an end that the caller's own time limit made: it is told as an error, not as a short output.
_OWN_DEADLINE = "rpc_deadline"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more of one choice. `stop_reason`: the stop text or token id that matched, or the label of what cut the output.

    prompt: it is the prompt, told before the output; log_probs then lack the first token's.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    log_probs: Sequence[pb.TokenLogProbability] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: bool = False


@dataclass(slots=True)
class Output:
    """All of one choice."""

    index: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text, after that of the prompt if it was asked for."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        return self.pieces[-1].finish_reason if self.pieces else None

    @property
    def stop_reason(self) -> str | int | None:
        """What ended it."""
        return self.pieces[-1].stop_reason if self.pieces else None


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one request, or of several together."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.prompt + other.prompt, self.cached + other.cached, self.output + other.output)

    def told(self) -> dict[str, Any]:
        """As the `usage` of an answer."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Reading:
    """Takes the events of one request. Its choices are numbered from `first` on; `ranked` ones in the order of their ends.

    Where a whole request fails, is cancelled, or meets its caller's own time limit, each of several choices has that end before
    the request has it: such ends are told when the request has ended well, and else the status alone says it.
    """

    def __init__(self, first: int, choices: int, *, ranked: bool) -> None:
        self._first = first
        self._open = list(range(choices))
        self._ranked = ranked
        self._held_back: list[Piece] = []
        self._next_no = 0
        self.counts = Counts()
        self.snapshot = ""

    def take(self, raw: bytes) -> list[Piece]:
        """What one event tells. Raises HttpError when events before it are missing that nobody has any more."""
        event = pb.GenerateResponse.FromString(raw)
        kind = event.WhichOneof("event")
        if kind == "completed":
            return self._completed(event.sequence_no, event.completed)
        self._next_no = event.sequence_no + 1
        if kind == "started":
            self.snapshot = event.started.model_snapshot
            self.counts = Counts(prompt=event.started.prompt_tokens)
        elif kind == "delta":
            delta = event.delta
            self._more(len(delta.token_ids))
            return [Piece(self._first + delta.index, delta.text, delta.token_ids, delta.log_probabilities)]
        elif kind == "prompt":
            prompt = event.prompt
            told = Piece(self._first, prompt.text, prompt.token_ids, prompt.log_probabilities, prompt=True)
            return [replace(told, index=self._first + index) for index in self._open]
        elif kind == "choice_ended":
            return self._choice_ended(event.choice_ended)
        return []

    def _choice_ended(self, ended: pb.ChoiceEnded) -> list[Piece]:
        index = self._open[0] if self._ranked else ended.index
        self._open.remove(index)
        self._more(len(ended.token_ids))
        reason = _FINISH_REASONS.get(ended.finish_reason, _ABORTED)
        piece = Piece(self._first + index, ended.text, ended.token_ids, ended.log_probabilities, reason, _stop_reason(ended))
        if reason == _ABORTED or ended.cause == _OWN_DEADLINE:
            self._held_back.append(piece)
            return []
        return [piece]

    def _completed(self, number: int, end: pb.Completed) -> list[Piece]:
        """The end of all choices that have none yet; nothing when the request failed: the status says that."""
        if end.HasField("usage"):
            usage = end.usage
            self.counts = Counts(usage.prompt_tokens, usage.cached_prompt_tokens, usage.billed_tokens)
        if end.state != pb.REQUEST_STATE_FINISHED or end.cause == _OWN_DEADLINE:
            return []
        if number != self._next_no and end.usage.returned_tokens:
            raise HttpError(410, "this request has ended, and its output is not kept any more", "REPLAY_GONE", "X-Request-Id")
        reason = _FINISH_REASONS.get(end.finish_reason, _ABORTED)
        # With several choices the text of each was told with its own end.
        return self._held_back + [
            Piece(self._first + index, end.text, end.token_ids, end.log_probabilities, reason, _stop_reason(end))
            for index in self._open
        ]

    def _more(self, tokens: int) -> None:
        self.counts = Counts(self.counts.prompt, self.counts.cached, self.counts.output + tokens)


def _stop_reason(end: pb.ChoiceEnded | pb.Completed) -> str | int | None:
    if end.matched_stop:
        return str(end.matched_stop)
    if end.finish_reason == pb.FINISH_REASON_STOP_TOKEN:
        return int(end.matched_token_id)
    return end.cause or None

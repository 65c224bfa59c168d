"""What a client got through the HTTP door: of one answer, and of all answers to its request together. Pure."""

from dataclasses import dataclass, field
from typing import Any

from lifecycle.finish import Cause
from tandem.v1 import inference_pb2 as pb
from tests.chaos.cancelling import Broken

#: Status of a call that had no answer, or whose answer broke off.
BROKEN_OFF = 0
#: Codes of ends that stand, which asking again does not change. A router has no member for new requests, too.
_ENDS = frozenset(cause.value.upper() for cause in Cause if cause.value) - {"NO_MEMBER"}
_AGAIN = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice so far. `finish_reason`: None until it has ended."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def fits(self, other: "Choice") -> bool:
        """Whether both can be the same choice, one further than the other."""
        short, long = sorted((self, other), key=lambda one: (one.finish_reason is not None, len(one.text)))
        if short.finish_reason is not None:
            return short == long
        return long.text.startswith(short.text)


@dataclass(slots=True)
class Answer:
    """One answer, put together from its parts, each of which is checked. Raises Broken. `choices`: how many were asked for."""

    choices: int
    told: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    tokens: int = 0
    done: bool = False

    def chunk(self, value: dict[str, Any]) -> None:
        """An event of a stream."""
        if self.done or self.error is not None or self.usage is not None:
            raise Broken(f"an event after the end: {value}")
        if "error" in value:
            self.error = value["error"]
            return
        for choice in value["choices"]:
            self._more(choice, choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        counts = value["usage"]
        self.tokens = counts["completion_tokens"]
        if not value["choices"]:
            self._ended(counts)

    def end(self) -> None:
        """[DONE]"""
        if self.done or (self.error is None and self.usage is None):
            raise Broken("[DONE] without an end before it, or twice")
        self.done = True

    def whole(self, value: dict[str, Any]) -> None:
        """An answer in one piece."""
        for choice in value["choices"]:
            self._more(choice, choice["text"] if "text" in choice else choice["message"]["content"])
        self._ended(value["usage"])
        self.tokens = value["usage"]["completion_tokens"]
        self.done = True

    def _more(self, choice: dict[str, Any], text: str) -> None:
        index, known = choice["index"], self.told.get(choice["index"], Choice())
        if known.finish_reason is not None or not 0 <= index < self.choices:
            raise Broken(f"choice {index} goes on after its end, or was not asked for: {choice}")
        self.told[index] = Choice(known.text + text, choice["finish_reason"], choice["stop_reason"])

    def _ended(self, counts: dict[str, Any]) -> None:
        if len(self.told) < self.choices or any(one.finish_reason is None for one in self.told.values()):
            raise Broken(f"an end, and choices without one: {self.told}")
        self.usage = counts


@dataclass(frozen=True, slots=True)
class Call:
    """One call and how it ended. `left`: by the client's own doing. `said`: of an error."""

    router: int
    status: int
    code: str = ""
    said: str = ""
    retry_after_s: float | None = None
    left: bool = False

    @property
    def broken_off(self) -> bool:
        """Whether it just ended, and not by the client's doing."""
        return self.status == BROKEN_OFF and not self.left

    @property
    def refused(self) -> bool:
        """Whether there was no room for the request, which is to come again."""
        return self.status == 429 and self.code not in _ENDS

    @property
    def again(self) -> bool:
        """Whether asking again may do better."""
        return self.status == BROKEN_OFF or (self.status in _AGAIN and self.code not in _ENDS)


@dataclass(slots=True)
class HttpStory:
    """What one client got. `told`: the furthest that any answer came with each choice. `left`: it went away for good."""

    request_id: str
    choices: int
    told: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    connections: list[Call] = field(default_factory=list)
    cancels: list[pb.CancelResponse] = field(default_factory=list)
    tokens: int = 0
    left: bool = False
    broken: str = ""

    @property
    def over(self) -> bool:
        """Whether it has its end."""
        return bool(self.connections) and not self.connections[-1].again

    @property
    def served(self) -> bool:
        """Whether that is the whole output."""
        return self.usage is not None

    def take(self, answer: Answer) -> None:
        """What an answer has brought by now. Raises Broken when it differs from what came before."""
        for index, choice in answer.told.items():
            known = self.told.get(index, Choice())
            if not choice.fits(known):
                raise Broken(f"choice {index} came again and was another: {known} / {choice}")
            if choice.finish_reason is not None or len(choice.text) > len(known.text):
                self.told[index] = choice
        self.tokens = max(self.tokens, answer.tokens)
        if answer.usage is not None and answer.done:
            self.usage = answer.usage

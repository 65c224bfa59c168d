"""What a client is told of several choices: each is what it would be alone, ends once, and the request ends as they did."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import inference_pb2 as pb
from tests.simulation.model import Reference
from tests.simulation.told_text import usual_reason

#: Endings from outside, at which a choice may be cut anywhere.
_OUTSIDE = (pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_DEADLINE_EXCEEDED, pb.FINISH_REASON_SLOW_CONSUMER)
_IN_ORDER = range(pb.FINISH_REASON_EOS, pb.FINISH_REASON_CONTEXT_LIMIT + 1)


@dataclass
class ChoicesSeen:
    """By index. `told`: so many of the references are to be told. log_probs: for so many likeliest tokens, None without any.

    cancelled: those that a client may have cancelled alone.
    """

    references: list[Reference]
    told: int
    log_probs: int | None
    cancelled: frozenset[int] = frozenset()
    text: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    values: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Another run begins."""
        for known in (self.text, self.tokens, self.values, self.ends):
            known.clear()

    def take(self, kind: str, event: Any, *, cumulative: bool) -> Iterator[str]:
        """One Delta or ChoiceEnded; sentences about what is wrong with it."""
        index, before = event.index, self.text.get(event.index, "")
        if index >= len(self.references):
            yield f"choice {index} was never asked for"
            return
        if index in self.ends:
            yield f"choice {index} goes on after its end"
        if cumulative and not event.text.startswith(before):
            yield f"choice {index}: {event.text!r} does not go on after {before!r}"
        text = self.text[index] = event.text if cumulative else before + event.text
        for known, new in ((self.tokens, event.token_ids), (self.values, event.log_probabilities)):
            known[index] = [*([] if cumulative else known.get(index, [])), *new]
        reference = self.references[index]
        if len(self.values[index]) != (len(self.tokens[index]) if self.log_probs is not None else 0):
            yield f"choice {index} has {len(self.values[index])} log-probabilities of {len(self.tokens[index])} tokens"
        known = [one.value for one in reference.log_probs[: len(self.values[index])] if one is not None]
        if [one.log_probability for one in self.values[index]] != known:
            yield f"choice {index} has log-probabilities {self.values[index]}, of {known}"
        if kind == "delta":
            if not reference.text.startswith(text):
                yield f"choice {index}: text {text!r} is no beginning of {reference.text!r}"
            return
        self.ends[index] = event.finish_reason
        if event.finish_reason == usual_reason(reference):
            if text != reference.text:
                yield f"choice {index} ended with {text!r} instead of {reference.text!r}"
        elif event.finish_reason not in _OUTSIDE:
            yield f"choice {index} ended with {event.finish_reason} {event.cause}"
        elif text not in {reference.ended_after(chosen)[0] for chosen in range(len(reference.tokens))}:
            yield f"choice {index} was cut at {text!r}, where {reference.text!r} has no token's end"

    def at_end(self, completed: Any) -> Iterator[str]:
        """Sentences about what is wrong with the end of all."""
        usage = completed.usage
        if completed.state == pb.REQUEST_STATE_FINISHED and completed.finish_reason in _IN_ORDER:
            if len(self.ends) != self.told:
                yield f"{len(self.ends)} choices had ended when all had, {self.told} are to be told"
                return
            in_order = [self.ends[index] for index in sorted(self.ends) if self.ends[index] in _IN_ORDER]
            if completed.finish_reason != (in_order or [None])[0]:
                yield f"finish reason {completed.finish_reason} of choices that ended with {self.ends}"
            for index, end in self.ends.items():
                if end == pb.FINISH_REASON_CANCELLED and index not in self.cancelled:
                    yield f"choice {index} was cancelled and nobody cancelled it"
            undisturbed = all(end == usual_reason(self.references[index]) for index, end in self.ends.items())
            if undisturbed and self.told == len(self.references):
                for name in ("selected_tokens", "returned_tokens", "billed_tokens"):
                    right = sum(getattr(one.usage, name) for one in self.references)
                    if getattr(usage, name) != right:
                        yield f"{name} is {getattr(usage, name)}, must be {right}"
            # One that was cancelled may be likelier than those that are told, and is not seen.
            if undisturbed and self.told < len(self.references) and not self.cancelled:
                yield from self._at_end_of_best()
        if completed.HasField("usage") and usage.returned_tokens != sum(map(len, self.tokens.values())):
            yield f"{self.tokens} came, {usage.returned_tokens} are counted as returned"

    def _at_end_of_best(self) -> Iterator[str]:
        best = sorted(range(len(self.references)), key=lambda index: (-_mean(self.references[index]), index))[: self.told]
        if list(self.ends) != best:
            yield f"the likeliest are {best}, told were {list(self.ends)}"


def _mean(reference: Reference) -> float:
    values = [one.value for one in reference.log_probs[: reference.usage.returned_tokens] if one is not None]
    return math.fsum(values) / len(values) if values else -math.inf
